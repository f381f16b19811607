#include "journal_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "crash_point.h"
#include "crc32c.h"
#include "errors.h"
#include "fault.h"
#include "file_calls.h"
#include "recording.h"

namespace tcxl {

using namespace layout;

namespace {

constexpr uint64_t kChunk = 4 << 20;

std::span<const FrameSegment> segments_of(const JournalFrame& frame) {
  return {reinterpret_cast<const FrameSegment*>(frame.bytes.data() + sizeof(JournalHeader)),
          frame.header.num_segments};
}

// What the checksums of a frame's records are continued from.
uint32_t record_seed(const Store& store, uint64_t id, uint64_t life, uint64_t table) {
  const bool is_bare = has_fault(Fault::kJournalNoIdInCrc);
  const uint64_t identity[3] = {is_bare ? 0 : id, is_bare ? 0 : life, table};
  return store.crc_of(identity, sizeof identity);
}

}  // namespace

// --- memory

void PageBuffer::Free::operator()(std::byte* p) const { std::free(p); }

void PageBuffer::reserve(uint64_t bytes) {
  if (bytes <= capacity_) return;
  capacity_ = round_up(bytes + bytes / 4, kPage);
  bytes_.reset(static_cast<std::byte*>(std::aligned_alloc(kPage, capacity_)));
  if (bytes_ == nullptr) fail_os(ENOMEM, text("cannot take ", capacity_, " bytes for a frame"));
  std::memset(bytes_.get(), 0, bytes);  // resident from now on, however small the first frame is
}

void JournalFrame::open(const Store& store, JournalKind kind, uint64_t life, uint64_t id) {
  header = {};
  header.magic = kJournalFrameMagic;
  header.kind = static_cast<uint64_t>(kind);
  header.life = life;
  header.id = id;
  lay_out(plan, sizeof(JournalHeader));
  bytes.reserve(plan.bytes + kResumeBytesMax);
  columns.clear();
  for (const FrameSegment& segment : plan.segments) {
    columns.push_back(
        record_columns(bytes.data(), segment, record_seed(store, id, life, segment.table)));
  }
}

void JournalFrame::close(const Store& store, uint64_t batch, const std::string& resume) {
  header.batch = batch;
  header.records = plan.records;
  header.num_segments = plan.segments.size();
  header.resume_offset = plan.bytes;
  header.resume_bytes = static_cast<uint32_t>(resume.size());
  header.resume_crc = store.crc_of(resume.data(), resume.size());
  header.bytes = round_up(plan.bytes + resume.size(), kPage);
  std::memcpy(bytes.data() + sizeof header, plan.segments.data(),
              plan.segments.size() * sizeof(FrameSegment));
  std::memcpy(bytes.data() + plan.bytes, resume.data(), resume.size());
  const uint64_t end = plan.bytes + resume.size();
  std::memset(bytes.data() + end, 0, header.bytes - end);
}

// --- file

JournalFile::JournalFile(const Store& store) : store_(store), path_(store.path() + "/journal") {
  const int flags = store.is_read_only() ? O_RDONLY : O_RDWR | O_CREAT;
  fd_ = Fd(::open(path_.c_str(), flags | O_CLOEXEC, 0666));
  if (!fd_.is_open() && errno == ENOENT) {
    fail(ErrorKind::kCorrupted, "'", path_,
         "' is missing\n  state: nothing was changed\n  do:    ", kRestoreAll);
  }
  if (!fd_.is_open()) fail_os(errno, text("cannot open '", path_, "'"));
  if (!store.is_read_only()) direct_ = Fd(::open(path_.c_str(), O_WRONLY | O_DIRECT | O_CLOEXEC));
  recording::resized(fd_.get());
  read_slots();  // of a shorter file, too: it may be cut
  if (bytes() >= kJournalRing || store.is_read_only()) return;
  const uint64_t had = bytes();
  if (const int error = allocate(fd_.get(), 0, kJournalRing); error != 0)
    fail_ring(error, had, kJournalRing);
  recording::resized(fd_.get());
  if (!has_fault(Fault::kJournalNoFolderSync)) sync_folder(store.path());
}

uint64_t JournalFile::bytes() const { return file_bytes(fd_.get()); }

void JournalFile::read_slots() {
  for (uint64_t i = 0; i < 2; ++i) {
    JournalSlot s;
    if (!read(&s, sizeof s, kJournalSlots[i])) continue;
    if (s.magic != kJournalSlotMagic || s.crc != store_.checksum(s) || (s.seq & 1) != i) continue;
    const uint64_t end = bytes();
    if (std::max({s.seq, s.life, s.base, s.first_lsn, s.pool_life}) > kCountMax) {
      fail(ErrorKind::kCorrupted, "a slot of '", path_, "' cannot be true: number ", s.seq,
           ", life ", s.life, ", base ", s.base,
           "\n  state: nothing was changed\n  do:    ", kRestoreAll);
    }
    const bool fits = s.ring_offset % kPage == 0 && s.ring_bytes % kPage == 0 &&
                      (s.ring_bytes == 0 || s.ring_offset >= kJournalRing) &&
                      s.ring_offset <= end && s.ring_bytes <= end - s.ring_offset &&
                      s.head % kPage == 0 && s.head <= s.ring_bytes;
    if (!fits) {
      fail(ErrorKind::kCorrupted, "'", path_, "' has ", end, " bytes, its ring ends at ",
           s.ring_offset + s.ring_bytes,
           "\n  state: truncated; nothing was changed\n  do:    ", kRestoreAll);
    }
    if (!slot_ || s.seq > slot_->seq) slot_ = s;
  }
}

void JournalFile::write_slot(JournalSlot next) {
  next.magic = kJournalSlotMagic;
  next.seq = slot_ ? slot_->seq + 1 : 1;
  next.crc = store_.checksum(next);
  put_slot(next);
}

void JournalFile::put_slot(const JournalSlot& slot) {
  alignas(kPage) std::byte page[kPage] = {};
  std::memcpy(page, &slot, sizeof slot);
  crash_point("journal: slot");
  write(page, kPage, kJournalSlots[slot.seq & 1]);
  crash_point("journal: slot written");
  if (!has_fault(Fault::kJournalNoSlotSync)) sync();
  slot_ = slot;
}

uint64_t JournalFile::allocate_ring(uint64_t ring_bytes) {
  const uint64_t offset = round_up(std::max(bytes(), kJournalRing), kRegionAlign);
  const uint64_t old_bytes = bytes(), end = offset + ring_bytes;
  if (const int error = allocate(fd_.get(), old_bytes, end); error != 0)
    fail_ring(error, old_bytes, end);
  recording::resized(fd_.get());
  PageBuffer zeros;
  zeros.reserve(kChunk);
  try {
    for (uint64_t at = offset; at < end; at += kChunk)
      write(zeros.data(), std::min(kChunk, end - at), at);
  } catch (const Error& error) {
    // What is allocated is no promise everywhere: copy-on-write, thin volumes.
    if (error.os_error != ENOSPC && error.os_error != EDQUOT) throw;
    fail_ring(error.os_error, old_bytes, end);
  }
  sync();
  return offset;
}

void JournalFile::fail_ring(int error, uint64_t old_bytes, uint64_t end) {
  if (::ftruncate(fd_.get(), static_cast<off_t>(old_bytes)) != 0)
    fail_os(errno, text("cannot shrink '", path_, "' back"));
  fail_allocation(error, fd_.get(), path_, end - old_bytes, end);
}

void JournalFile::release(uint64_t offset, uint64_t ring_bytes) {
  // Where the file system cannot, the space stays taken: nothing depends on it.
  if (ring_bytes > 0 &&
      ::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                  static_cast<off_t>(ring_bytes)) == 0)
    recording::punched(fd_.get(), offset, ring_bytes);
}

void JournalFile::copy(uint64_t from, uint64_t to, uint64_t count) {
  PageBuffer chunk;
  chunk.reserve(kChunk);
  for (uint64_t at = 0; at < count; at += kChunk) {
    const uint64_t n = std::min(kChunk, count - at);
    if (!read(chunk.data(), n, from + at)) fail_os(EIO, text("cannot read '", path_, "'"));
    write(chunk.data(), n, to + at);
  }
}

// --- frames

uint32_t JournalFile::header_crc(const JournalHeader& header, const void* segments) const {
  JournalHeader blank = header;
  blank.crc = 0;
  return crc32c(store_.crc_of(&blank, sizeof blank), segments,
                header.num_segments * sizeof(FrameSegment));
}

void JournalFile::write_frame(JournalFrame& frame, uint64_t offset) {
  frame.header.crc = header_crc(frame.header, frame.bytes.data() + sizeof(JournalHeader));
  std::memcpy(frame.bytes.data(), &frame.header, sizeof(JournalHeader));
  crash_point("journal: frame");
  if (has_fault(Fault::kJournalSharedSector)) {  // as if frames began within a sector
    const std::byte zeros[512] = {};
    write(zeros, sizeof zeros, offset - sizeof zeros);
  }
  write(frame.bytes.data(), frame.header.bytes, offset);
}

void JournalFile::write_skip(uint64_t offset, uint64_t skipped, uint64_t lsn, uint64_t life,
                             uint64_t acked_lsn) {
  JournalHeader header{};
  header.magic = kJournalFrameMagic;
  header.lsn = lsn;
  header.life = life;
  header.kind = static_cast<uint64_t>(JournalKind::kSkip);
  header.bytes = skipped;
  header.acked_lsn = acked_lsn;
  header.crc = header_crc(header, nullptr);
  alignas(kPage) std::byte page[kPage] = {};
  std::memcpy(page, &header, sizeof header);
  write(page, kPage, offset);
}

bool JournalFile::read_frame(uint64_t offset, uint64_t room, uint64_t lsn, uint64_t life,
                             JournalFrame& frame) const {
  JournalHeader& h = frame.header;
  if (room < kPage || !read(&h, sizeof h, offset)) return false;
  const bool is_skip = h.kind == static_cast<uint64_t>(JournalKind::kSkip);
  const bool is_of_life = h.life == life || has_fault(Fault::kJournalNoLife);
  const bool is_known = is_skip || h.kind == static_cast<uint64_t>(JournalKind::kPrevious) ||
                        h.kind == static_cast<uint64_t>(JournalKind::kBatch);
  if (h.magic != kJournalFrameMagic || h.lsn != lsn || !is_of_life || h.bytes > room ||
      h.bytes < kPage || h.bytes % kPage != 0 || !is_known ||
      h.num_segments > (is_skip ? 0 : store_.tables().size()) ||
      h.num_segments > (h.bytes - sizeof h) / sizeof(FrameSegment))
    return false;
  frame.plan.segments.clear();
  frame.columns.clear();
  if (is_skip) return h.crc == header_crc(h, nullptr);
  frame.bytes.reserve(h.bytes);
  std::byte* bytes = frame.bytes.data();
  if (!read(bytes, h.bytes, offset) || std::memcmp(bytes, &h, sizeof h) != 0 ||
      h.crc != header_crc(h, bytes + sizeof h))
    return false;
  const auto segments = segments_of(frame);
  if (h.resume_bytes > kResumeBytesMax || h.resume_offset > h.bytes ||
      h.resume_bytes > h.bytes - h.resume_offset ||
      store_.crc_of(bytes + h.resume_offset, h.resume_bytes) != h.resume_crc ||
      !segments_fault(segments, store_.tables(), h.bytes, h.records).empty())
    return false;
  frame.plan.segments.assign(segments.begin(), segments.end());
  for (const FrameSegment& s : segments) {
    const RecordColumns c = record_columns(bytes, s, record_seed(store_, h.id, h.life, s.table));
    const TableView& view = store_.tables()[s.table].view;
    for (uint64_t r = 0; r < s.count; ++r) {
      if (c.row[r] >= view.rows || record_crc(c, view, r) != c.crc[r]) return false;
    }
    frame.columns.push_back(c);
  }
  return true;
}

bool JournalFile::read_header(uint64_t offset, uint64_t room, uint64_t lsn, uint64_t life,
                              JournalHeader& header) const {
  if (room < kPage || !read(&header, sizeof header, offset)) return false;
  if (header.magic != kJournalFrameMagic || header.lsn != lsn || header.life != life ||
      header.bytes < kPage || header.bytes > room || header.num_segments > store_.tables().size() ||
      header.num_segments > (header.bytes - sizeof header) / sizeof(FrameSegment))
    return false;
  std::vector<FrameSegment> segments(header.num_segments);
  return read(segments.data(), segments.size() * sizeof(FrameSegment), offset + sizeof header) &&
         header.crc == header_crc(header, segments.data());
}

bool JournalFile::has_later_frame(const JournalSlot& slot, uint64_t lsn, uint64_t begin,
                                  uint64_t bytes) const {
  const std::unique_ptr<std::byte[]> chunk(new std::byte[std::min(kChunk, slot.ring_bytes)]);
  uint64_t n = 0;
  for (uint64_t at = begin; bytes > 0; bytes -= n, at += n) {
    if (at >= slot.ring_bytes) at = 0;
    n = std::min({kChunk, slot.ring_bytes - at, bytes});
    if (!read(chunk.get(), n, slot.ring_offset + at)) return false;
    for (uint64_t page = 0; page < n; page += kPage) {
      JournalHeader h;
      std::memcpy(&h, chunk.get() + page, sizeof h);
      if (h.magic != kJournalFrameMagic || h.life != slot.life || h.lsn <= lsn ||
          h.acked_lsn < lsn || h.num_segments > (n - page - sizeof h) / sizeof(FrameSegment))
        continue;
      if (h.crc == header_crc(h, chunk.get() + page + sizeof h)) return true;
    }
  }
  return false;
}

// --- system calls

void JournalFile::write(const void* data, uint64_t count, uint64_t offset) {
  const auto* from = static_cast<const std::byte*>(data);
  while (count > 0) {
    const bool is_pages = (reinterpret_cast<uintptr_t>(from) | count | offset) % kPage == 0;
    const bool is_direct = is_pages && direct_.is_open();
    const int fd = is_direct ? direct_.get() : fd_.get();
    const ssize_t n = ::pwrite(fd, from, count, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EINVAL && is_direct) {  // not on this file system, or not in such pages
      direct_.reset();
      continue;
    }
    if (n <= 0) fail_os(n < 0 ? errno : EIO, text("cannot write '", path_, "'"));
    recording::written(fd_.get(), offset, from, static_cast<uint64_t>(n));
    from += n;
    offset += static_cast<uint64_t>(n);
    count -= static_cast<uint64_t>(n);
  }
}

bool JournalFile::read(void* data, uint64_t count, uint64_t offset) const {
  auto* to = static_cast<std::byte*>(data);
  while (count > 0) {
    const ssize_t n = ::pread(fd_.get(), to, count, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_os(errno, text("cannot read '", path_, "'"));
    if (n == 0) return false;
    to += n;
    offset += static_cast<uint64_t>(n);
    count -= static_cast<uint64_t>(n);
  }
  return true;
}

void JournalFile::sync() {
  crash_point("journal: sync");
  if (sync_file_data(fd_.get()) != 0) {
    const int error = errno;
    store_.distrust();
    throw Error(ErrorKind::kOs, sync_failed(error, path_), error);
  }
  crash_point("journal: synced");
}

}  // namespace tcxl
