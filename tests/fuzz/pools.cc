#include "pools.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <set>
#include <string_view>

#include "dense_log.h"
#include "errors.h"
#include "journal_file.h"
#include "kernels.h"
#include "repair.h"
#include "store.h"
#include "undo_log.h"

namespace tcxl::fuzz {

using namespace layout;

namespace {

constexpr uint64_t kLife = 3, kJournalLife = 2;
constexpr uint64_t kRingPages = 24, kWrappedHead = 18;
constexpr uint64_t kCommitted = 5;  // one more batch was under way
constexpr uint64_t kBase = 1;       // of the journal
constexpr uint64_t kDescriptors = 8;
constexpr uint64_t kRowCounts[] = {600, 40, 16};

TableRecord table_record(std::string_view name, uint64_t rows, uint32_t dim, OptimizerKind kind) {
  TableRecord r{};
  std::memcpy(r.name, name.data(), name.size());
  r.rows = rows;
  r.dim = dim;
  r.optimizer = static_cast<uint32_t>(kind);
  return r;
}

struct Shape {
  bool has_power = false, is_fused = false, is_wrapped = false, is_new = false;
};

// Writes a pool the way the engine does, in one thread.
class Builder {
 public:
  Builder(const std::string& folder, const Shape& shape)
      : shape_(shape), store_(options(folder, shape)), undo_(store_), dense_(store_) {
    store_.add_table(table_record("a", kRowCounts[0], 4, OptimizerKind::kRowWiseAdagrad));
    store_.add_table(table_record("b", kRowCounts[1], 3, OptimizerKind::kAdagrad));
    store_.add_table(table_record("c", kRowCounts[2], 1, OptimizerKind::kSgd));
    store_.commit_tables();
    undo_.attach();
    if (shape.has_power) journal_ = std::make_unique<JournalFile>(store_);
  }

  void run() {
    if (shape_.is_new) return;
    undo_.grow(kRegionAlign, kRegionAlign / 4);
    capture(0);
    commit(0);
    for (uint64_t n = 1; n <= kCommitted + 1; ++n) {
      choose_rows(n);
      log_previous();
      log_rows(n);
      change_rows(n, n > kCommitted);
      if (n > kCommitted) break;
      log_batch(n);
      if (n == kBase || n == kCommitted - 1) capture(n);
      commit(n);
      if (n == kBase && journal_) begin_ring();
    }
  }

 private:
  static OpenOptions options(const std::string& folder, const Shape& shape) {
    OpenOptions o;
    o.path = folder;
    o.sparse = true;
    if (shape.has_power) o.durability = DurabilityLevel::kPower, o.force_medium = "block";
    return o;
  }

  static std::string resume(uint64_t batch) { return text("{\"batch\": ", batch, "}"); }

  void capture(uint64_t batch) {
    const std::string blob(500, static_cast<char>('a' + batch));
    dense_.capture(batch, kLife, resume(batch), {{blob.data(), blob.size()}});
    while (!dense_.write_slice()) {
    }
    dense_.complete();
    dense_.publish();
  }

  void commit(uint64_t batch) {
    const Generation& g = *dense_.newest();
    Slot s{};
    s.batch = batch;
    s.life = kLife;
    s.dense_batch = g.header.batch, s.dense_life = g.header.life;
    s.dense_area = g.area, s.dense_crc = g.header.crc;
    store_.write_slot(s, resume(batch));
  }

  void choose_rows(uint64_t n) {
    for (size_t t = 0; t < 3; ++t) {
      // One batch with many rows: fused frames of several blocks, journal frames of several pages.
      const uint64_t count = t == 0 && n == 3 ? 300 : t == 2 && n % 2 == 0 ? 0 : 4 + n;
      rows_[t].clear();
      for (uint64_t i = 0; i < count; ++i) rows_[t].push_back((n + i) % kRowCounts[t]);
      std::sort(rows_[t].begin(), rows_[t].end());
    }
  }

  void log_rows(uint64_t n) {
    FramePlan plan;
    for (size_t t = 0; t < 3; ++t) {
      if (!rows_[t].empty()) add_segment(plan, t, store_.tables()[t].view, rows_[t].size());
    }
    lay_out(plan, sizeof(FrameHeader));
    uint64_t offset = 0;
    TCXL_ASSERT(undo_.reserve(n, plan.bytes, offset));
    if (shape_.is_fused) undo_.set_flag(n, kLife, offset, plan, true);
    for (const FrameSegment& s : plan.segments) {
      const RecordColumns log = undo_.columns(offset, s, n, kLife);
      copy_rows_to_log(store_.tables()[s.table].view, rows_[s.table].data(), nullptr, s.count, log,
                       nullptr);
      const uint64_t block = fused_block_rows(s.dim);
      for (uint64_t b = 0; shape_.is_fused && b * block < s.count; ++b)
        log.done[b] = n > kCommitted && s.table > 0 ? 0 : block_tag(log, b);
    }
    Persistence::fence();
    if (!shape_.is_fused) undo_.set_flag(n, kLife, offset, plan, false);
  }

  void change_rows(uint64_t n, bool first_table_only) {
    for (size_t t = 0; t < (first_table_only ? 1 : 3); ++t) {
      const TableView& view = store_.tables()[t].view;
      const auto dim = static_cast<uint64_t>(view.dim);
      const auto states = static_cast<uint64_t>(state_dim(view.optimizer, view.dim));
      for (const uint64_t row : rows_[t]) {
        for (uint64_t d = 0; d < dim; ++d) view.weight[row * dim + d] += static_cast<float>(n);
        for (uint64_t d = 0; d < states; ++d) view.state[row * states + d] += 1.0f;
      }
    }
  }

  // --- journal

  void begin_ring() {
    JournalSlot s{};
    s.ring_bytes = kRingPages * kPage;
    s.ring_offset = journal_->allocate_ring(s.ring_bytes);
    s.life = kJournalLife;
    s.pool_life = kLife;
    const Slot& slot = *store_.slot();
    for (s.base = 0; s.base <= kBase; ++s.base) {  // two slots, the older one of the base before
      s.head = at_ = shape_.is_wrapped ? kWrappedHead * kPage : 0;
      s.first_lsn = 1;
      s.dense_batch = slot.dense_batch, s.dense_life = slot.dense_life;
      s.dense_area = slot.dense_area, s.dense_crc = slot.dense_crc;
      journal_->write_slot(s);
    }
  }

  bool has_ring() const { return journal_ && journal_->slot(); }

  void log_previous() {
    if (!has_ring()) return;
    std::array<std::vector<uint64_t>, 3> first;
    for (size_t t = 0; t < 3; ++t) {
      for (const uint64_t row : rows_[t]) {
        if (touched_.insert({t, row}).second) first[t].push_back(row);
      }
    }
    write_frame(JournalKind::kPrevious, 0, first, "");
  }

  void log_batch(uint64_t n) {
    if (has_ring()) write_frame(JournalKind::kBatch, n, rows_, resume(n));
  }

  void write_frame(JournalKind kind, uint64_t batch,
                   const std::array<std::vector<uint64_t>, 3>& rows, const std::string& record) {
    JournalFrame frame;
    for (size_t t = 0; t < 3; ++t) {
      if (!rows[t].empty()) add_segment(frame.plan, t, store_.tables()[t].view, rows[t].size());
    }
    frame.open(store_, kind, kJournalLife, lsn_);
    for (size_t s = 0; s < frame.columns.size(); ++s) {
      const FrameSegment& segment = frame.plan.segments[s];
      copy_rows_to_log(store_.tables()[segment.table].view, rows[segment.table].data(), nullptr,
                       segment.count, frame.columns[s], nullptr);
    }
    Persistence::fence();
    frame.close(store_, batch, record);
    const uint64_t ring = journal_->slot()->ring_offset, end = kRingPages * kPage;
    if (at_ + frame.header.bytes > end) {
      if (at_ < end) {
        journal_->write_skip(ring + at_, end - at_, lsn_, kJournalLife, lsn_ - 1);
        ++lsn_;
      }
      at_ = 0;
    }
    frame.header.lsn = lsn_;
    frame.header.acked_lsn = lsn_ - 1;
    journal_->write_frame(frame, ring + at_);
    at_ += frame.header.bytes;
    ++lsn_;
  }

  const Shape shape_;
  Store store_;
  UndoLog undo_;
  DenseLog dense_;
  std::unique_ptr<JournalFile> journal_;
  std::array<std::vector<uint64_t>, 3> rows_;
  std::set<std::pair<size_t, uint64_t>> touched_;
  uint64_t at_ = 0, lsn_ = 1;
};

// --- places

template <typename Header>
void find_segments(TemplatePool& pool, FileIndex file, uint64_t frame, Structure segment,
                   Structure row) {
  const uint64_t count = pool.image.read<Header>(file, frame)->num_segments;
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t at = frame + sizeof(Header) + i * sizeof(FrameSegment);
    const auto* s = pool.image.read<FrameSegment>(file, at);
    pool.at(segment).push_back({file, at});
    pool.at(row).push_back({file, frame + s->row_offset});
    if (file == kLog) pool.at(Structure::kTag).push_back({file, frame + s->done_offset});
  }
}

// Newest first.
template <typename T>
void find_copies(TemplatePool& pool, Structure structure, FileIndex file, uint64_t a, uint64_t b) {
  const auto* first = pool.image.read<T>(file, a);
  const auto* second = pool.image.read<T>(file, b);
  if (first == nullptr || second == nullptr) return;
  if (second->seq > first->seq) std::swap(a, b);
  pool.at(structure) = {{file, a}, {file, b}};
}

void find_places(TemplatePool& pool) {
  PoolImage& image = pool.image;
  pool.at(Structure::kSuperblock) = {{kLog, kSuperblockA}, {kLog, kSuperblockB}};
  pool.at(Structure::kSession) = {{kLog, kSession}};
  find_copies<Slot>(pool, Structure::kSlot, kLog, kSlotA, kSlotB);
  find_copies<GeometryHeader>(pool, Structure::kGeometry, kLog, kGeometryA, kGeometryB);
  const uint64_t geometry = pool.at(Structure::kGeometry)[0].offset;
  const auto* g = image.read<GeometryHeader>(kLog, geometry);
  for (uint64_t t = 0; t < g->num_tables; ++t)
    pool.at(Structure::kTable)
        .push_back({kLog, geometry + sizeof(GeometryHeader) + t * sizeof(TableRecord)});
  for (uint32_t area = 0; area < kDenseAreas; ++area) {
    if (g->dense_bytes[area] > 0)
      pool.at(Structure::kDense).push_back({kLog, g->dense_offset[area]});
  }
  for (uint64_t n = 1; n <= kDescriptors; ++n) {
    const uint64_t at = kDirectory + n * kDescriptorBytes;
    pool.at(Structure::kDescriptor).push_back({kLog, at});
    const auto* d = image.read<Descriptor>(kLog, at);
    if (d->bytes == 0) continue;
    pool.at(Structure::kFrame).push_back({kLog, d->offset});
    find_segments<FrameHeader>(pool, kLog, d->offset, Structure::kSegment, Structure::kRow);
  }
  find_copies<JournalSlot>(pool, Structure::kJournalSlot, kJournal, kJournalSlots[0],
                           kJournalSlots[1]);
  if (pool.at(Structure::kJournalSlot).empty()) return;
  const auto* s = image.read<JournalSlot>(kJournal, pool.at(Structure::kJournalSlot)[0].offset);
  for (uint64_t at = s->head; s->magic != 0;) {
    if (at == s->ring_bytes) at = 0;
    const auto* h = image.read<JournalHeader>(kJournal, s->ring_offset + at);
    if (h->magic != kJournalFrameMagic) break;
    pool.at(Structure::kJournalFrame).push_back({kJournal, s->ring_offset + at});
    find_segments<JournalHeader>(pool, kJournal, s->ring_offset + at, Structure::kJournalSegment,
                                 Structure::kJournalRow);
    at += h->bytes;
  }
}

}  // namespace

void build_pool(size_t number, const std::string& folder, TemplatePool& pool) {
  const std::string_view name = kPoolNames[number];
  Shape shape;
  shape.is_fused = name == "fused";
  shape.is_wrapped = name == "wrapped";
  shape.is_new = name.starts_with("new");
  shape.has_power = shape.is_wrapped || name.ends_with("power");
  Builder(folder, shape).run();
  for (size_t i = 0; i < kNumFiles; ++i) pool.image.files[i].load(folder + "/" + kFileNames[i]);
  for (const uint64_t offset : {kSuperblockA, kSuperblockB}) {
    auto* s = pool.image.edit<Superblock>(kLog, offset);
    for (uint8_t i = 0; i < sizeof s->uuid; ++i) s->uuid[i] = i;
  }
  repair(pool.image);
  for (FileImage& file : pool.image.files) file.keep();
  pool.has_power = shape.has_power;
  find_places(pool);
}

}  // namespace tcxl::fuzz
