#include "repair.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>

#include "crc32c.h"
#include "kernels.h"
#include "layout.h"
#include "media.h"

namespace tcxl::fuzz {

using namespace layout;

namespace {

constexpr uint64_t kDescriptorsBefore = 16, kDescriptorsAfter = 9;  // around the newest commit
constexpr int kFramesMax = 64;

class Repair {
 public:
  explicit Repair(PoolImage& image) : image_(image) {}

  void run() {
    for (const uint64_t offset : {kSuperblockA, kSuperblockB}) {
      const auto* s = image_.read<Superblock>(kLog, offset);
      if (s == nullptr) return;
      if (s->magic == kSuperblockMagic)
        image_.put(kLog, s->crc, crc32c(0, s, sizeof *s - sizeof s->crc));
    }
    const auto* a = image_.read<Superblock>(kLog, kSuperblockA);
    const auto* b = image_.read<Superblock>(kLog, kSuperblockB);
    seed_ = crc32c(0, (a->magic == kSuperblockMagic ? a : b)->uuid, sizeof a->uuid);
    are_records_as_built_ = true;  // until something that their checksums depend on is not
    for (const Superblock* s : {a, b}) {
      require_as_built(&s->magic, sizeof s->magic);
      require_as_built(s->uuid, sizeof s->uuid);
    }
    seal<Session>(kLog, kSession, kSessionMagic);
    for (const uint64_t offset : {kGeometryA, kGeometryB}) repair_geometry(offset);
    require_as_built(tables_.data(), tables_.size_bytes());
    for (uint32_t area = 0; area < layout::kDenseAreas; ++area) repair_dense(geometry_, area);
    for (const uint64_t offset : {kSlotA, kSlotB}) repair_slot(offset);
    repair_descriptors();
    for (const uint64_t offset : kJournalSlots) repair_journal_slot(offset);
    repair_ring();
  }

 private:
  bool is_as_built(FileIndex file, uint64_t offset, uint64_t bytes) const {
    return image_.files[file].is_as_built(offset, bytes);
  }

  void require_as_built(const void* p, uint64_t bytes) {
    if (bytes > 0 && !is_as_built(kLog, image_.files[kLog].offset_of(p), bytes))
      are_records_as_built_ = false;
  }

  template <typename T>
  const T* seal(FileIndex file, uint64_t offset, uint64_t magic) {
    const auto* p = image_.read<T>(file, offset);
    if (p == nullptr || p->magic != magic) return nullptr;
    image_.put(file, p->crc, crc32c(seed_, p, sizeof(T) - sizeof p->crc));
    return p;
  }

  // Checksum of a header with crc 0 and what follows it.
  template <typename T>
  std::optional<uint32_t> crc_with_tail(T header, FileIndex file, uint64_t offset, uint64_t bytes) {
    header.crc = 0;
    const std::byte* tail = image_.files[file].at(offset + sizeof(T), bytes);
    if (tail == nullptr || bytes > kTailMax) return std::nullopt;
    return crc32c(crc32c(seed_, &header, sizeof header), tail, bytes);
  }

  void set_crc(FileIndex file, uint64_t offset, uint64_t bytes, const uint32_t& crc) {
    const std::byte* p = image_.files[file].at(offset, bytes);
    if (p != nullptr) image_.put(file, crc, crc32c(seed_, p, bytes));
  }

  void repair_geometry(uint64_t offset) {
    const auto* g = image_.read<GeometryHeader>(kLog, offset);
    if (g == nullptr || g->magic != kGeometryMagic || g->num_tables > kTablesMax) return;
    const uint64_t bytes = g->num_tables * sizeof(TableRecord);
    image_.put(kLog, g->crc, crc_with_tail(*g, kLog, offset, bytes).value_or(g->crc));
    if (geometry_.magic != 0 && g->seq <= geometry_.seq) return;
    const auto* records =
        image_.read<TableRecord>(kLog, offset + sizeof(GeometryHeader), g->num_tables);
    if (records == nullptr) return;
    geometry_ = *g;
    tables_ = {records, g->num_tables};
  }

  void repair_dense(const GeometryHeader& g, uint32_t area) {
    const uint64_t at = g.dense_offset[area];
    const auto* h = image_.read<DenseHeader>(kLog, at);
    if (g.dense_bytes[area] == 0 || h == nullptr || h->magic != kDenseMagic) return;
    set_crc(kLog, at + kDenseResume, h->resume_bytes, h->resume_crc);
    set_crc(kLog, at + kDenseBlob, h->blob_bytes, h->blob_crc);
    const uint32_t before = h->crc;
    seal<DenseHeader>(kLog, at, kDenseMagic);
    for (const uint64_t offset : {kSlotA, kSlotB})
      rename(kLog, image_.read<Slot>(kLog, offset), before, *h);
    for (const uint64_t offset : kJournalSlots)
      rename(kJournal, image_.read<JournalSlot>(kJournal, offset), before, *h);
  }

  // A slot that named the generation by its checksum goes on naming it.
  template <typename T>
  void rename(FileIndex file, const T* slot, uint32_t before, const DenseHeader& h) {
    if (slot != nullptr && slot->dense_crc == before) image_.put(file, slot->dense_crc, h.crc);
  }

  void repair_slot(uint64_t offset) {
    const auto* s = image_.read<Slot>(kLog, offset);
    if (s == nullptr || s->magic != kSlotMagic) return;
    if (s->resume_bytes <= kResumeBytesMax)
      set_crc(kLog, offset == kSlotB ? kResumeB : kResumeA, s->resume_bytes, s->resume_crc);
    seal<Slot>(kLog, offset, kSlotMagic);
    newest_batch_ = std::max(newest_batch_, s->batch);
  }

  void repair_descriptors() {
    constexpr uint64_t kAround = kDescriptorsBefore + kDescriptorsAfter;
    const uint64_t last = newest_batch_ + kDescriptorsAfter;
    for (uint64_t i = 0; i < kAround; ++i) repair_descriptor((last - i) % kDirectoryEntries);
    for (uint64_t i = 0; i < kDescriptorsBefore; ++i) {
      if ((last - i) % kDirectoryEntries >= kAround) repair_descriptor(i);
    }
  }

  void repair_descriptor(uint64_t entry) {
    const uint64_t at = kDirectory + entry * kDescriptorBytes;
    const auto* d = image_.read<Descriptor>(kLog, at);
    if (d == nullptr || d->magic != kDescriptorMagic) return;
    const auto* h = d->offset % kLine == 0 ? image_.read<FrameHeader>(kLog, d->offset) : nullptr;
    if (h != nullptr && h->magic == kFrameMagic) {
      const uint64_t identity[2] = {h->batch, h->life};
      const uint64_t segments = std::min(h->num_segments, kSegmentsMax);
      repair_segments<FrameHeader>(kLog, d->offset, segments, identity, h->is_fused != 0);
      const auto crc = crc_with_tail(*h, kLog, d->offset, h->num_segments * sizeof(FrameSegment));
      image_.put(kLog, h->crc, crc.value_or(h->crc));
      image_.put(kLog, d->frame_crc, h->crc);
    }
    image_.put(kLog, d->crc, crc32c(seed_, d, sizeof *d - sizeof d->crc));
  }

  template <typename Header>
  void repair_segments(FileIndex file, uint64_t frame, uint64_t count,
                       const uint64_t (&identity)[2], bool is_fused) {
    const bool is_header_as_built =
        are_records_as_built_ && is_as_built(file, frame, offsetof(Header, crc));
    for (uint64_t i = 0; i < count; ++i) {
      const uint64_t at = frame + sizeof(Header) + i * sizeof(FrameSegment);
      const auto* s = image_.read<FrameSegment>(file, at);
      if (s == nullptr) return;
      if (is_header_as_built && is_as_built(file, at, sizeof *s) &&
          is_as_built(file, frame + s->row_offset, s->weight_offset - s->row_offset) &&
          is_as_built(file, frame + s->weight_offset, s->count * s->dim * sizeof(float)))
        continue;  // the columns lie one behind the other
      const uint64_t whole[3] = {identity[0], identity[1], s->table};
      repair_records(file, frame, *s, crc32c(seed_, whole, sizeof whole), is_fused);
    }
  }

  // Segment and table by value: what is repaired may lie over them.
  void repair_records(FileIndex file, uint64_t frame, FrameSegment s, uint32_t crc_start,
                      bool is_fused) {
    if (s.table >= tables_.size() || s.count > kRecordsMax) return;
    const TableRecord t = tables_[s.table];
    if (t.dim == 0 || t.dim > kDimMax || t.optimizer > 2) return;
    TableView view;
    view.rows = t.rows;
    view.dim = t.dim;
    view.optimizer = static_cast<OptimizerKind>(t.optimizer);
    if (s.count * t.dim > kFloatsMax) return;
    const auto states = static_cast<uint64_t>(state_dim(view.optimizer, view.dim));
    const uint64_t offsets[] = {s.row_offset, s.crc_offset, s.state_offset, s.weight_offset,
                                s.done_offset};
    for (const uint64_t offset : offsets) {
      if (offset % sizeof(uint64_t) != 0 || offset > FileImage::kBufferBytes) return;
    }
    RecordColumns c;
    c.row = image_.edit<uint64_t>(file, frame + s.row_offset, s.count);
    c.crc = image_.edit<uint32_t>(file, frame + s.crc_offset, s.count);
    c.state = image_.edit<float>(file, frame + s.state_offset, s.count * states);
    c.weight = image_.edit<float>(file, frame + s.weight_offset, s.count * t.dim);
    c.crc_start = crc_start;
    if (c.row == nullptr || c.crc == nullptr || c.state == nullptr || c.weight == nullptr) return;
    for (uint64_t r = 0; r < s.count; ++r) c.crc[r] = record_crc(c, view, r);
    const uint64_t blocks = (s.count + fused_block_rows(t.dim) - 1) / fused_block_rows(t.dim);
    c.done = is_fused ? image_.edit<uint64_t>(file, frame + s.done_offset, blocks) : nullptr;
    for (uint64_t b = 0; c.done != nullptr && b < blocks; ++b) {
      if (c.done[b] != 0) c.done[b] = block_tag(c, b);
    }
  }

  void repair_journal_slot(uint64_t offset) {
    const auto* s = seal<JournalSlot>(kJournal, offset, kJournalSlotMagic);
    if (s != nullptr && (ring_.magic == 0 || s->seq > ring_.seq)) ring_ = *s;
  }

  void repair_ring() {
    uint64_t at = ring_.head;
    for (int frames = 0; ring_.magic != 0 && frames < kFramesMax; ++frames) {
      if (at >= ring_.ring_bytes) at = 0;
      const uint64_t offset = ring_.ring_offset + at;
      const auto* h = offset % kPage == 0 ? image_.read<JournalHeader>(kJournal, offset) : nullptr;
      if (h == nullptr || h->magic != kJournalFrameMagic) return;
      repair_frame(*h, offset);
      if (h->bytes == 0 || h->bytes % kPage != 0) return;
      at += h->bytes;
    }
  }

  void repair_frame(const JournalHeader& h, uint64_t offset) {
    if (h.resume_offset <= FileImage::kBufferBytes)
      set_crc(kJournal, offset + h.resume_offset, h.resume_bytes, h.resume_crc);
    const uint64_t segments = std::min(h.num_segments, kSegmentsMax);
    const uint64_t identity[2] = {h.id, h.life};
    repair_segments<JournalHeader>(kJournal, offset, segments, identity, false);
    const auto crc = crc_with_tail(h, kJournal, offset, h.num_segments * sizeof(FrameSegment));
    image_.put(kJournal, h.crc, crc.value_or(h.crc));
  }

  static constexpr uint64_t kSegmentsMax = 256, kRecordsMax = 4096, kDimMax = 1 << 16;
  static constexpr uint64_t kTailMax =
      std::max(kGeometryBytes, kSegmentsMax * sizeof(FrameSegment));
  static constexpr uint64_t kFloatsMax = 1 << 14;  // more would take most of the fuzzer's time
  PoolImage& image_;
  uint32_t seed_ = 0;
  GeometryHeader geometry_{};
  std::span<const TableRecord> tables_;
  bool are_records_as_built_ = false;
  uint64_t newest_batch_ = 0;
  JournalSlot ring_{};
};

}  // namespace

void repair(PoolImage& image) { Repair(image).run(); }

bool passes_superblock(const PoolImage& image, bool has_power, bool is_read_only) {
  const Superblock* found = nullptr;
  for (const uint64_t offset : {kSuperblockB, kSuperblockA}) {
    const auto* s = image.read<Superblock>(kLog, offset);
    if (s != nullptr && s->magic == kSuperblockMagic &&
        s->crc == crc32c(0, s, sizeof *s - sizeof s->crc))
      found = s;
  }
  if (found == nullptr || image.files[kLog].bytes() < kHeadBytes || !image.files[kData].exists())
    return false;
  const auto level = has_power ? DurabilityLevel::kPower : DurabilityLevel::kProcess;
  return found->endian_mark == kEndianMark && found->major == kFormatMajor &&
         (found->incompat & ~kIncompat) == 0 && found->head_bytes == kHeadBytes &&
         found->directory_entries == kDirectoryEntries &&
         (is_read_only || (found->durability == static_cast<uint32_t>(level) &&
                           (found->ro_compat & ~kRoCompat) == 0));
}

bool is_counted_out(const PoolImage& image) {
  constexpr uint64_t kNear = 16;
  uint64_t most = 0;
  const auto see = [&most](uint64_t n) { most = n <= kCountMax ? std::max(most, n) : most; };
  for (const uint64_t offset : {kSlotA, kSlotB}) {
    const auto* s = image.read<Slot>(kLog, offset);
    if (s != nullptr) see(s->seq), see(s->batch), see(s->life);
  }
  for (const uint64_t offset : kJournalSlots) {
    const auto* s = image.read<JournalSlot>(kJournal, offset);
    if (s != nullptr) see(s->seq), see(s->life), see(s->base), see(s->first_lsn), see(s->pool_life);
  }
  return most + kNear > kCountMax;
}

}  // namespace tcxl::fuzz
