// The undo log's ring against a plain model: every frame that is live keeps its place and its
// bytes, frames never overlap, space is refused only when there is none, and what was flagged is
// found.
#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include "check.h"
#include "errors.h"
#include "pool_folder.h"
#include "undo_log.h"

namespace {

using namespace tcxl;
using namespace tcxl::layout;
using namespace tcxl::test;

constexpr uint64_t kRows = 500;
constexpr uint64_t kLife = 7;

struct Random {
  std::mt19937_64 engine;
  uint64_t below(uint64_t n) { return engine() % n; }
};

void make_tables(Store& store) {
  store.add_table(table_record("a", kRows, 16, OptimizerKind::kRowWiseAdagrad));
  store.add_table(table_record("b", kRows, 5, OptimizerKind::kAdagrad));
  store.add_table(table_record("c", kRows, 1, OptimizerKind::kSgd));
  store.commit_tables();
}

void fill_tables(Store& store, float value) {
  for (const Table& t : store.tables()) {
    const auto dim = static_cast<uint64_t>(t.view.dim);
    const auto states = static_cast<uint64_t>(state_dim(t.view.optimizer, t.view.dim));
    for (uint64_t i = 0; i < kRows * dim; ++i) t.view.weight[i] = value + static_cast<float>(i);
    for (uint64_t i = 0; i < kRows * states; ++i) t.view.state[i] = value - static_cast<float>(i);
  }
}

std::vector<float> copy_tables(const Store& store) {
  std::vector<float> all;
  for (const Table& t : store.tables()) {
    const auto dim = static_cast<uint64_t>(t.view.dim);
    const auto states = static_cast<uint64_t>(state_dim(t.view.optimizer, t.view.dim));
    all.insert(all.end(), t.view.weight, t.view.weight + kRows * dim);
    if (states > 0) all.insert(all.end(), t.view.state, t.view.state + kRows * states);
  }
  return all;
}

std::vector<uint64_t> some_rows(Random& random, uint64_t most) {
  std::vector<uint64_t> rows;
  for (uint64_t i = random.below(most + 1); i > 0; --i) rows.push_back(random.below(kRows));
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  return rows;
}

// Plans and writes the frame of `batch` over the given rows of each table; false: no room.
bool write_frame(Store& store, UndoLog& undo, uint64_t batch,
                 const std::vector<std::vector<uint64_t>>& rows, uint64_t& offset, FramePlan& plan,
                 bool is_fused = false) {
  plan = {};
  for (size_t t = 0; t < rows.size(); ++t) {
    if (!rows[t].empty()) add_segment(plan, t, store.tables()[t].view, rows[t].size());
  }
  lay_out(plan, sizeof(FrameHeader));
  if (!undo.reserve(batch, plan.bytes, offset)) return false;
  if (is_fused) undo.set_flag(batch, kLife, offset, plan, true);  // the records follow the flag
  for (const FrameSegment& s : plan.segments) {
    const RecordColumns log = undo.columns(offset, s, batch, kLife);
    copy_rows_to_log(store.tables()[s.table].view, rows[s.table].data(), nullptr, s.count, log,
                     nullptr);
    for (uint64_t block = 0; is_fused && block * fused_block_rows(s.dim) < s.count; ++block)
      log.done[block] = block_tag(log, block);
  }
  store.persistence().fence();
  if (!is_fused) undo.set_flag(batch, kLife, offset, plan, false);
  return true;
}

void change_rows(Store& store, const std::vector<std::vector<uint64_t>>& rows, float by) {
  for (size_t t = 0; t < rows.size(); ++t) {
    const TableView& view = store.tables()[t].view;
    const auto dim = static_cast<uint64_t>(view.dim);
    const auto states = static_cast<uint64_t>(state_dim(view.optimizer, view.dim));
    for (const uint64_t row : rows[t]) {
      for (uint64_t d = 0; d < dim; ++d) view.weight[row * dim + d] += by;
      for (uint64_t d = 0; d < states; ++d) view.state[row * states + d] -= by;
    }
  }
}

// Batches with rows of all tables; rolled back newest first, each step gives the tables before it.
void test_roll_back() {
  PoolFolder folder;
  Store store(folder.options());
  make_tables(store);
  fill_tables(store, 1.0f);
  UndoLog undo(store);
  undo.attach();
  undo.grow(4 << 20, 1 << 20);
  Random random{std::mt19937_64(1)};
  std::vector<std::vector<float>> before;
  constexpr uint64_t kBatches = 20;
  for (uint64_t n = 1; n <= kBatches; ++n) {
    before.push_back(copy_tables(store));
    const std::vector<std::vector<uint64_t>> rows = {some_rows(random, 40), some_rows(random, 40),
                                                     some_rows(random, n % 5 == 0 ? 0 : 40)};
    uint64_t offset = 0;
    FramePlan plan;
    CHECK(write_frame(store, undo, n, rows, offset, plan, n % 2 == 0));
    change_rows(store, rows, static_cast<float>(n));
  }
  for (uint64_t n = kBatches; n > 0; --n) {
    const auto d = undo.find(n, kLife);
    CHECK(d.has_value());
    CHECK(!undo.find(n, kLife + 1));
    undo.check(*d, true);
    const UndoLog::RolledBack done = undo.roll_back(*d);
    CHECK_EQUAL(done.changed, d->records);
    CHECK_EQUAL(done.records, d->records);
    CHECK_EQUAL(undo.roll_back(*d).changed, uint64_t{0});  // again: nothing differs any more
    CHECK(copy_tables(store) == before[n - 1]);
  }
}

// A fused frame whose update came half-way: its blocks are rolled back, the other rows are left
// alone. Of a committed batch it is damage.
void test_half_done_frame() {
  PoolFolder folder;
  Store store(folder.options());
  make_tables(store);
  fill_tables(store, 1.0f);
  UndoLog undo(store);
  undo.attach();
  undo.grow(4 << 20, 1 << 20);
  std::vector<uint64_t> rows(kRows);
  std::iota(rows.begin(), rows.end(), uint64_t{0});
  const std::vector<float> before = copy_tables(store);
  uint64_t offset = 0;
  FramePlan plan;
  CHECK(write_frame(store, undo, 1, {rows, {}, {0}}, offset, plan, true));
  const uint64_t block = fused_block_rows(plan.segments[0].dim);
  RecordColumns log = undo.columns(offset, plan.segments[0], 1, kLife);
  log.done[0] = 0;  // never came to its tag: its records may be anything
  log.crc[0] ^= 1;
  rows.erase(rows.begin(), rows.begin() + static_cast<int64_t>(block));
  change_rows(store, {rows, {}, {0}}, 5.0f);
  const auto d = undo.find(1, kLife);
  undo.check(*d, false);
  bool is_damaged = false;
  try {
    undo.check(*d, true);
  } catch (const Error& error) {
    is_damaged = error.kind == ErrorKind::kCorrupted;
  }
  CHECK(is_damaged);
  const UndoLog::RolledBack done = undo.roll_back(*d);
  CHECK_EQUAL(done.records, kRows - block + 1);
  CHECK(copy_tables(store) == before);
}

// A batch without rows has a flag and nothing to roll back.
void test_empty_frame() {
  PoolFolder folder;
  Store store(folder.options());
  make_tables(store);
  UndoLog undo(store);
  undo.attach();
  undo.grow(2 << 20, 1 << 20);
  uint64_t offset = 0;
  FramePlan plan;
  CHECK(write_frame(store, undo, 1, {{}, {}, {}}, offset, plan));
  const auto d = undo.find(1, kLife);
  CHECK(d && d->bytes == 0 && d->records == 0);
  undo.check(*d, true);
  CHECK_EQUAL(undo.roll_back(*d).changed, uint64_t{0});
}

struct Frame {
  uint64_t offset, bytes;
};

bool overlap(const Frame& a, const Frame& b) {
  return a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
}

// The space that a ring of `ring` bytes can give next, by looking at the live frames alone.
bool model_has_room(const std::map<uint64_t, Frame>& live, uint64_t ring_offset, uint64_t ring,
                    uint64_t bytes) {
  if (live.empty()) return bytes <= ring;
  const Frame first = live.begin()->second, last = live.rbegin()->second;
  const uint64_t tail = first.offset - ring_offset, head = last.offset + last.bytes - ring_offset;
  if (last.offset < first.offset) return head + bytes <= tail;
  return head + bytes <= ring || bytes <= tail;
}

// Thousands of random reserve, release, reclaim and grow steps.
void test_ring_against_model() {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    PoolFolder folder;
    Store store(folder.options());
    make_tables(store);
    UndoLog undo(store);
    undo.attach();
    uint64_t ring = 2 << 20, ring_offset = 0, newest = 0, oldest = 1, wraps = 0, refused = 0;
    undo.grow(ring, ring);
    ring_offset = store.geometry().ring_offset;
    std::map<uint64_t, Frame> live, retired;  // by batch
    Random random{std::mt19937_64(seed)};
    int grown = 0;
    for (int step = 0; step < 3000; ++step) {
      const uint64_t choice = random.below(100);
      if (choice < 60) {
        const uint64_t bytes = kLine * (1 + random.below(random.below(10) == 0 ? 16000 : 6000));
        uint64_t offset = 0;
        const bool expected = model_has_room(live, ring_offset, ring, bytes);
        const bool ok = undo.reserve(newest + 1, bytes, offset);
        if (!CHECK_EQUAL(ok, expected)) return;
        if (!ok) {
          ++refused;
          continue;
        }
        const Frame frame{offset, bytes};
        CHECK(offset >= ring_offset && offset + bytes <= ring_offset + ring && offset % kLine == 0);
        for (const auto& [batch, other] : live) CHECK(!overlap(frame, other));
        for (const auto& [batch, other] : retired) CHECK(!overlap(frame, other));
        if (!live.empty() && offset < live.rbegin()->second.offset) ++wraps;
        live[++newest] = frame;
        if (random.below(4) > 0) {
          FramePlan plan;  // the flag alone: the place of the records does not matter here
          undo.set_flag(newest, kLife, offset, plan, false);
          CHECK(undo.find(newest, kLife));
        }
        CHECK(!undo.find(newest + 1, kLife));
      } else if (choice < 65 && newest >= oldest) {
        const uint64_t from = newest - random.below(std::min<uint64_t>(3, newest - oldest + 1));
        undo.release_from(from);
        for (uint64_t n = from; n <= newest; ++n) {
          CHECK(!undo.find(n, kLife));
          live.erase(n);
          retired.erase(n);
        }
        newest = from - 1;
      } else if (choice < 99) {
        const uint64_t upto = std::min(newest, oldest - 1 + random.below(3));
        undo.reclaim(upto);
        for (; oldest <= upto; ++oldest) {
          live.erase(oldest);
          retired.erase(oldest);
        }
      } else if (grown < 3) {
        ++grown;
        ring += 2 << 20;
        undo.grow(ring, ring);
        CHECK(store.geometry().ring_offset != ring_offset);
        ring_offset = store.geometry().ring_offset;
        retired.insert(live.begin(), live.end());
        live.clear();
      }
      uint64_t used = 0;
      for (const auto& [batch, frame] : live) used += frame.bytes;
      CHECK_EQUAL(undo.used_bytes(), used);
      CHECK_EQUAL(undo.live_frames(), static_cast<uint64_t>(live.size() + retired.size()));
    }
    CHECK(wraps > 20 && refused > 20);
  }
}

// Frames in an earlier, smaller ring still roll back after the log has grown, also in a new
// process.
void test_growth_keeps_old_frames() {
  PoolFolder folder;
  std::vector<float> before;
  {
    Store store(folder.options());
    make_tables(store);
    fill_tables(store, 3.0f);
    UndoLog undo(store);
    undo.attach();
    undo.grow(2 << 20, 1 << 20);
    before = copy_tables(store);
    uint64_t offset = 0;
    FramePlan plan;
    CHECK(write_frame(store, undo, 1, {{1, 2, 499}, {0}, {7}}, offset, plan));
    change_rows(store, {{1, 2, 499}, {0}, {7}}, 10.0f);
    undo.grow(8 << 20, 4 << 20);
    uint64_t second = 0;
    CHECK(write_frame(store, undo, 2, {{1, 3}, {}, {7}}, second, plan));
    CHECK(second > offset);
    change_rows(store, {{1, 3}, {}, {7}}, 20.0f);
  }
  Store store(folder.options());
  UndoLog undo(store);
  undo.attach();
  CHECK_EQUAL(undo.ring_bytes(), uint64_t{8 << 20});
  for (const uint64_t n : {2, 1}) {
    const auto d = undo.find(n, kLife);
    CHECK(d.has_value());
    undo.check(*d, true);
    undo.roll_back(*d);
  }
  CHECK(copy_tables(store) == before);
}

// No more live frames than the directory has entries: the flag of a live batch is never
// overwritten.
void test_directory_limit() {
  PoolFolder folder;
  Store store(folder.options());
  make_tables(store);
  UndoLog undo(store);
  undo.attach();
  undo.grow(2 << 20, 1 << 20);
  uint64_t offset = 0, n = 0;
  while (n < 2 * kDirectoryEntries && undo.reserve(n + 1, kLine, offset)) {
    FramePlan plan;
    undo.set_flag(++n, kLife, offset, plan, false);
  }
  CHECK(n < kDirectoryEntries && n > kDirectoryEntries - 4);
  for (uint64_t batch = 1; batch <= n; ++batch) CHECK(undo.find(batch, kLife));
  undo.reclaim(1);
  CHECK(undo.reserve(n + 1, kLine, offset));
}

// Every bit of a frame, its segment table and its flag: flipped, it is refused or not found, and no
// row changes.
void test_flips(bool is_fused) {
  PoolFolder folder;
  Store store(folder.options());
  make_tables(store);
  fill_tables(store, 1.0f);
  UndoLog undo(store);
  undo.attach();
  undo.grow(2 << 20, 1 << 20);
  uint64_t offset = 0;
  FramePlan plan;
  const std::vector<std::vector<uint64_t>> rows = {{0, 9}, {499}, {3, 4}};
  CHECK(write_frame(store, undo, 1, rows, offset, plan, is_fused));
  change_rows(store, rows, 5.0f);
  const std::vector<float> changed = copy_tables(store);
  auto refused = [&] {
    const auto d = undo.find(1, kLife);
    if (!d) return true;
    try {
      undo.check(*d, true);
    } catch (const Error& error) {
      return error.kind == ErrorKind::kCorrupted;
    }
    return false;
  };
  // Bytes between the columns belong to nothing; a flip there changes no record.
  std::vector<bool> is_used(plan.bytes, false);
  auto use = [&](uint64_t begin, uint64_t bytes) {
    std::fill_n(is_used.begin() + static_cast<int64_t>(begin), bytes, true);
  };
  use(0, sizeof(FrameHeader) + plan.segments.size() * sizeof(FrameSegment));
  for (const FrameSegment& s : plan.segments) {
    use(s.row_offset, s.count * 8);
    use(s.crc_offset, s.count * 4);
    if (is_fused) use(s.done_offset, 8);
    use(s.state_offset, s.count * s.state_floats * 4);
    use(s.weight_offset, s.count * s.dim * 4);
  }
  auto* frame = store.log().at<uint8_t>(offset);
  for (uint64_t i = 0; i < plan.bytes; ++i) {
    const auto mask = static_cast<uint8_t>(1u << (i % 8));
    frame[i] ^= mask;
    CHECK_CASE(refused() == is_used[i], "byte " + std::to_string(i));
    frame[i] ^= mask;
  }
  auto* flag = store.log().at<uint8_t>(kDirectory + 1 * kDescriptorBytes);
  for (uint64_t i = 0; i < kDescriptorBytes; ++i) {
    flag[i] ^= 0x20;
    CHECK_CASE(refused(), "byte of the flag " + std::to_string(i));
    flag[i] ^= 0x20;
  }
  CHECK(copy_tables(store) == changed);
  CHECK(!refused());
}

}  // namespace

int main() {
  test_roll_back();
  test_empty_frame();
  test_ring_against_model();
  test_growth_keeps_old_frames();
  test_directory_limit();
  test_half_done_frame();
  test_flips(false);
  test_flips(true);
  return check_result();
}
