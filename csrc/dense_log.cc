#include "dense_log.h"

#include <algorithm>
#include <cstring>
#include <tuple>

#include "crash_point.h"
#include "crc32c.h"
#include "errors.h"
#include "fault.h"

namespace tcxl {

using namespace layout;

namespace {

constexpr uint64_t kSliceBytes =
    256 << 10;  // short enough that an announced batch never waits long for its log

// Two generations of one batch differ in the record (end of an epoch, finished).
bool is_later(const DenseHeader& a, const DenseHeader& b) {
  return std::tie(a.batch, a.life, a.revision) > std::tie(b.batch, b.life, b.revision);
}

}  // namespace

void name_generation(Slot& slot, const Generation& generation) {
  slot.dense_batch = generation.header.batch;
  slot.dense_life = generation.header.life;
  slot.dense_area = generation.area;
  slot.dense_crc = generation.header.crc;
}

std::string DenseLog::check_header(uint32_t area, Generation& out) const {
  const GeometryHeader& g = store_.geometry();
  if (g.dense_bytes[area] < kDenseBlob) return "no area";
  if (g.dense_offset[area] > store_.log().bytes() ||
      g.dense_bytes[area] > store_.log().bytes() - g.dense_offset[area])
    return "area outside the log";
  const std::byte* base = store_.log().base() + g.dense_offset[area];
  DenseHeader h;
  std::memcpy(&h, base, sizeof h);
  if (h.magic == 0) return "empty";
  if (h.magic != kDenseMagic || h.crc != store_.checksum(h)) return "header has a wrong checksum";
  if (h.batch > kCountMax || h.life > kCountMax)
    return text("header cannot be true: batch ", h.batch, ", life ", h.life);
  if (h.resume_bytes > kResumeBytesMax || h.blob_bytes > g.dense_bytes[area] - kDenseBlob)
    return "header names more bytes than the area has";
  out = {area, h};
  return "";
}

std::string DenseLog::check_area(uint32_t area, Generation& out) const {
  Generation found;
  const std::string reason = check_header(area, found);
  if (!reason.empty()) return reason;
  const std::byte* base = store_.log().base() + store_.geometry().dense_offset[area];
  const DenseHeader& h = found.header;
  if (store_.crc_of(base + kDenseResume, h.resume_bytes) != h.resume_crc)
    return "resume record has a wrong checksum";
  if (store_.crc_of(base + kDenseBlob, h.blob_bytes) != h.blob_crc)
    return "dense part has a wrong checksum";
  out = found;
  return "";
}

std::optional<Generation> DenseLog::newest_valid(const Slot& slot, bool is_slot_newest) const {
  std::optional<Generation> best;
  for (uint32_t area = 0; area < kDenseAreas; ++area) {
    Generation g;
    if (!check_header(area, g).empty() || g.header.batch > slot.batch) continue;
    // No undo log reaches back further than its directory: who walks to the commit comes to an end.
    if (slot.batch - g.header.batch >= kDirectoryEntries) continue;
    const bool named = slot.dense_batch == g.header.batch && slot.dense_life == g.header.life &&
                       slot.dense_area == area && slot.dense_crc == g.header.crc;
    if (!named && (g.header.life != slot.life || slot.rolling_back == kRewinding)) continue;
    const bool is_chosen = best && is_slot_newest && best->header.batch == g.header.batch;
    const bool is_better = !best || (is_chosen ? named : is_later(g.header, best->header));
    if (is_better && check_area(area, g).empty()) best = g;
  }
  return best;
}

uint64_t DenseLog::newest_life() const {
  uint64_t life = 0;
  for (uint32_t area = 0; area < kDenseAreas; ++area) {
    Generation g;
    if (check_header(area, g).empty()) life = std::max(life, g.header.life);
  }
  return life;
}

std::string DenseLog::read_resume(const Generation& g) const {
  return std::string(store_.log().at<char>(store_.geometry().dense_offset[g.area] + kDenseResume),
                     g.header.resume_bytes);
}

const std::byte* DenseLog::blob(const Generation& g) const {
  return store_.log().base() + store_.geometry().dense_offset[g.area] + kDenseBlob;
}

void DenseLog::capture(uint64_t batch, uint64_t life, const std::string& resume,
                       const std::vector<Part>& parts, const Horizon& horizon) {
  TCXL_ASSERT(!is_writing_);
  if (resume.size() > kResumeBytesMax)
    fail(ErrorKind::kFull, "the resume record has ", resume.size(), " bytes, at most ",
         kResumeBytesMax,
         " fit\n  do:    keep large state in the model or optimizer, not in `state` objects");
  uint64_t bytes = 0;
  for (const Part& part : parts) bytes += part.bytes;
  ensure_areas(kDenseBlob + bytes, horizon);
  uint32_t area = choose_area(batch, kDenseBlob + bytes, horizon);
  if (has_fault(Fault::kDenseOverNewest) && newest_) area = newest_->area;
  const bool is_resumed = newest_ && newest_->header.life < life;
  if (has_fault(Fault::kDenseOverResumed) && is_resumed) area = newest_->area;
  if (staging_bytes_ < bytes) {
    staging_.reset(new std::byte[bytes]);
    staging_bytes_ = bytes;
  }
  std::byte* to = staging_.get();
  for (const Part& part : parts) {
    if (part.bytes > 0) std::memcpy(to, part.data, part.bytes);
    to += part.bytes;
  }
  held_[area].reset();
  staged_.area = area;
  staged_area_ = store_.log().base() + store_.geometry().dense_offset[area];
  staged_.header = {};
  staged_.header.magic = kDenseMagic;
  staged_.header.life = life;
  staged_.header.batch = batch;
  const bool is_again = newest_ && newest_->header.batch == batch && newest_->header.life == life;
  staged_.header.revision = is_again ? newest_->header.revision + 1 : 0;
  staged_.header.blob_bytes = bytes;
  staged_.header.resume_bytes = static_cast<uint32_t>(resume.size());
  staged_.header.resume_crc = store_.crc_of(resume.data(), resume.size());
  staged_resume_ = resume;
  written_ = 0;
  is_body_written_ = false;
  crc_ = store_.crc_seed();
  is_writing_ = true;
}

bool DenseLog::write_slice() {
  TCXL_ASSERT(is_writing_ && !is_body_written_);
  std::byte* base = staged_area_;
  const Persistence& p = store_.persistence();
  if (written_ == 0) {  // an old header must not stand over a new body
    std::memset(base, 0, sizeof(DenseHeader));
    p.persist(base, sizeof(DenseHeader));
    std::memcpy(base + kDenseResume, staged_resume_.data(), staged_resume_.size());
    if (!has_fault(Fault::kNoDenseFlush)) p.flush(base + kDenseResume, staged_resume_.size());
  }
  const uint64_t bytes = std::min(kSliceBytes, staged_.header.blob_bytes - written_);
  if (bytes > 0) {
    crc_ = crc32c(crc_, staging_.get() + written_, bytes);
    std::memcpy(base + kDenseBlob + written_, staging_.get() + written_, bytes);
    if (!has_fault(Fault::kNoDenseFlush)) p.flush(base + kDenseBlob + written_, bytes);
    written_ += bytes;
    crash_point("dense: slice");
  }
  if (written_ < staged_.header.blob_bytes) return false;
  p.fence();  // body before header: the header says that the body is complete
  if (!has_fault(Fault::kJournalNoDenseSync)) store_.make_durable(base, kDenseBlob + written_);
  is_body_written_ = true;
  return true;
}

void DenseLog::complete() {
  TCXL_ASSERT(is_writing_ && is_body_written_);
  std::byte* base = staged_area_;
  const Persistence& p = store_.persistence();
  staged_.header.blob_crc = crc_;
  staged_.header.crc = store_.checksum(staged_.header);
  std::memcpy(base, &staged_.header, sizeof(DenseHeader));
  if (!has_fault(Fault::kNoDenseHeaderPersist)) p.persist(base, sizeof(DenseHeader));
  if (!has_fault(Fault::kJournalNoDenseSync)) store_.make_durable(base, sizeof(DenseHeader));
}

void DenseLog::publish() {
  newest_ = staged_;
  held_[staged_.area] = staged_.header;
  is_writing_ = false;
}

void DenseLog::set_newest(const Generation& generation) {
  newest_ = generation;
  for (uint32_t area = 0; area < kDenseAreas; ++area) {
    Generation g;
    held_[area].reset();
    if (check_header(area, g).empty()) held_[area] = g.header;
  }
}

void DenseLog::forget(uint32_t area) {
  if (!newest_ || newest_->area != area) held_[area].reset();
}

void DenseLog::rewrite(const Generation& from, uint64_t batch, uint64_t life,
                       const std::string& resume) {
  // Beside a journal it may so far have survived only a kill, and the copy takes the place of the
  // one before it.
  if (!has_fault(Fault::kJournalDenseRewrittenEarly)) {
    store_.make_durable(store_.log().base() + store_.geometry().dense_offset[from.area],
                        kDenseBlob + from.header.blob_bytes);
  }
  set_newest(from);
  capture(batch, life, resume, {{blob(from), from.header.blob_bytes}});
  while (!write_slice()) {
  }
  complete();
  publish();
}

}  // namespace tcxl
