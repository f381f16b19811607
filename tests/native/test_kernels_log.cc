// Undo records: what copy_rows_to_log and the hand-off of update_rows write, its checksums and what
// is flushed.
#include <cstring>

#include "check.h"
#include "crc32c.h"
#include "kernels.h"
#include "kernels_reference.h"

namespace {

using namespace tcxl;
using namespace tcxl::test;

constexpr uint64_t kRows = 400;

struct Span {
  const char* p;
  size_t bytes;
};
std::vector<Span> flushed;  // what note_flush was called for
void note_flush(const void* p, size_t bytes) {
  flushed.push_back({static_cast<const char*>(p), bytes});
}

bool was_flushed(const void* p, size_t bytes) {
  const char* c = static_cast<const char*>(p);
  for (const Span& span : flushed) {
    if (c >= span.p && c + bytes <= span.p + span.bytes) return true;
  }
  return bytes == 0;
}

std::vector<uint64_t> some_rows(int64_t keep_percent, Random& random) {
  std::vector<uint64_t> rows;
  for (uint64_t row = 0; row < kRows; ++row) {
    if (random.below(100) < keep_percent) rows.push_back(row);
  }
  return rows;
}

// The record holds `row` of `table` as it is now; the checksum is computed here by the table form.
bool holds_row(const Log& log, const Table& table, uint64_t record, uint64_t row) {
  const auto dim = static_cast<size_t>(table.view.dim);
  const auto state = static_cast<size_t>(state_dim(table.view.optimizer, table.view.dim));
  std::string bytes(reinterpret_cast<const char*>(&row), 8);
  bytes.append(reinterpret_cast<const char*>(table.state.data() + row * state), state * 4);
  bytes.append(reinterpret_cast<const char*>(table.weight.data() + row * dim), dim * 4);
  const uint32_t crc = crc32c_table(log.columns.crc_start, bytes.data(), bytes.size());
  return log.row[record] == row && log.crc[record] == crc &&
         record_crc(log.columns, table.view, record) == crc &&
         std::memcmp(log.weight.data() + record * dim, table.weight.data() + row * dim, dim * 4) ==
             0 &&
         std::memcmp(log.state.data() + record * state, table.state.data() + row * state,
                     state * 4) == 0;
}

bool is_untouched(const Log& log, const Table& table, uint64_t record) {
  const auto dim = static_cast<size_t>(table.view.dim);
  const auto state = static_cast<size_t>(state_dim(table.view.optimizer, table.view.dim));
  bool untouched = log.row[record] == ~uint64_t{0} && log.crc[record] == 0x5a5a5a5au;
  for (size_t d = 0; d < dim; ++d) untouched &= log.weight[record * dim + d] == -77.0f;
  for (size_t d = 0; d < state; ++d) untouched &= log.state[record * state + d] == -77.0f;
  return untouched;
}

// Whether an element of a short column was flushed or lies in a line that was written as a whole,
// hence by non-temporal stores (x86-64): records [begin, end) were written together.
template <typename Column>
bool is_durable(const Column& column, uint64_t record, uint64_t begin, uint64_t end) {
  using T = std::remove_cvref_t<decltype(*column.data())>;
  if (was_flushed(column.data() + record, sizeof(T))) return true;
#if defined(__x86_64__)
  const uint64_t in_line = 64 / sizeof(T), line = begin + (record - begin) / in_line * in_line;
  return reinterpret_cast<uintptr_t>(column.data() + begin) % 64 == 0 && line + in_line <= end;
#else
  (void)begin, (void)end;
  return false;
#endif
}

// Weights may leave by non-temporal stores too (whole lines); all else must have been flushed.
bool record_was_flushed(const Log& log, const Table& table, uint64_t record, uint64_t begin,
                        uint64_t end) {
  const auto dim = static_cast<size_t>(table.view.dim);
  const auto state = static_cast<size_t>(state_dim(table.view.optimizer, table.view.dim));
#if defined(__x86_64__)
  const bool streams = dim % 16 == 0;
#else
  const bool streams = false;
#endif
  const bool has_state = state == 1 ? is_durable(log.state, record, begin, end)
                                    : was_flushed(log.state.data() + record * state, state * 4);
  return is_durable(log.row, record, begin, end) && is_durable(log.crc, record, begin, end) &&
         ((streams && state == dim) || has_state) &&
         (streams || was_flushed(log.weight.data() + record * dim, dim * 4));
}

template <typename Test>
void for_each_table(const Test& test) {
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    if (!use_isa(isa)) continue;
    for (const int64_t dim :
         {1, 2, 3, 4, 7, 8, 12, 16, 17, 31, 32, 48, 64, 100, 128, 129, 256, 1000, 1024}) {
      for (const auto optimizer :
           {OptimizerKind::kSgd, OptimizerKind::kAdagrad, OptimizerKind::kRowWiseAdagrad}) {
        Random random{static_cast<uint64_t>(dim) * 3 + static_cast<uint64_t>(optimizer) + 1};
        Table table(kRows, dim, optimizer, random);
        test(table, random, std::string(isa_name(isa)) + ", dim " + std::to_string(dim));
      }
    }
  }
}

void copies_rows(Table& table, Random& random, const std::string& name) {
  const std::vector<uint64_t> rows = some_rows(60, random);
  for (const uint64_t count : {uint64_t{0}, uint64_t{1}, uint64_t{6}, uint64_t{rows.size()}}) {
    Log log(rows.size(), table.view);
    flushed.clear();
    copy_rows_to_log(table.view, rows.data(), nullptr, count, log.columns, note_flush);
    bool right = true, durable = true;
    for (uint64_t r = 0; r <= rows.size(); ++r) {
      const bool inside = r < count;
      right &= inside ? holds_row(log, table, r, rows[r]) : is_untouched(log, table, r);
      durable &= !inside || record_was_flushed(log, table, r, 0, count);
    }
    CHECK_CASE(right, name);
    CHECK_CASE(durable, name);
  }
}

void copies_chosen_records(Table& table, Random& random, const std::string& name) {
  const std::vector<uint64_t> rows = some_rows(60, random);
  std::vector<uint32_t> chosen;
  for (uint32_t r = 0; r < rows.size(); ++r) {
    if (random.below(3) == 0) chosen.push_back(r);
  }
  Log log(rows.size(), table.view);
  copy_rows_to_log(table.view, rows.data(), chosen.data(), chosen.size(), log.columns, nullptr);
  bool right = true;
  size_t next = 0;
  for (uint32_t r = 0; r <= rows.size(); ++r) {
    const bool inside = next < chosen.size() && chosen[next] == r;
    next += inside;
    right &= inside ? holds_row(log, table, r, rows[r]) : is_untouched(log, table, r);
  }
  CHECK_CASE(right, name);
}

// After the update every row that the next batch shares lies in its record with its value after the
// update, and no other record is touched.
void update_hands_rows_over(Table& table, Random& random, const std::string& name) {
  const int64_t dim = table.view.dim;
  const Feature feature = random_feature(kRows, 60, 1500, Pooling::kSum, false, 0, random);
  Floats grad(60 * static_cast<size_t>(dim));
  for (size_t i = 0; i < grad.size(); ++i) grad[i] = random.uniform();
  const FeatureBags bags = feature.bags();
  TableLookups lookups;
  lookups.build(&bags, 1, 60, dim, kRows);
  const std::vector<uint64_t> next_rows = some_rows(50, random);
  std::vector<uint32_t> next_record, taken_from;
  match_rows(lookups.rows, next_rows, next_record);
  match_rows(next_rows, lookups.rows, taken_from);
  for (const bool flushes : {false, true}) {
    Log log(next_rows.size(), table.view);
    UpdateJob job;
    job.table = table.view;
    job.lookups = &lookups;
    job.grad = grad.data();
    job.learning_rate = 0.01f;
    job.eps = 1e-8f;
    job.next_record = next_record.data();
    job.next_log = log.columns;
    job.flush = flushes ? note_flush : nullptr;
    flushed.clear();
    update_rows(job, 0, 3);
    update_rows(job, 3, lookups.num_rows());
    bool right = is_untouched(log, table, next_rows.size()), durable = true;
    for (uint64_t r = 0; r < next_rows.size(); ++r) {
      const bool handed_over = taken_from[r] != kNoRecord;
      right &= handed_over ? holds_row(log, table, r, next_rows[r]) : is_untouched(log, table, r);
      durable &= !flushes || !handed_over || record_was_flushed(log, table, r, r, r);
    }
    CHECK_CASE(right, name);
    for (const uint64_t row : lookups.rows) {
      if (!flushes) break;
      const auto state = static_cast<uint64_t>(state_dim(table.view.optimizer, dim));
      durable &= was_flushed(table.weight.data() + row * static_cast<uint64_t>(dim),
                             static_cast<size_t>(dim) * 4);
      durable &= was_flushed(table.state.data() + row * state, state * 4);
    }
    CHECK_CASE(durable, name);
    CHECK_CASE(flushes || flushed.empty(), name);
  }
}

// What a power failure at a fence of a fused update would find.
struct FusedWatch {
  Table* table;
  const Table* before;
  const Log* log;
  const std::vector<uint64_t>* rows;
  uint64_t block_rows, fences;
  bool right;
};
FusedWatch fused_watch;

void watch_fence() {
  FusedWatch& w = fused_watch;
  const auto dim = static_cast<uint64_t>(w.table->view.dim);
  const auto states = static_cast<uint64_t>(state_dim(w.table->view.optimizer, w.table->view.dim));
  // The first fence of a block stands between its records and its tag, the second before its rows.
  const uint64_t block = w.fences / 2;
  for (uint64_t b = 0; b * w.block_rows < w.rows->size(); ++b) {
    const bool is_done = b < block || (b == block && w.fences % 2 == 1);
    w.right &= w.log->done[b] == (is_done ? block_tag(w.log->columns, b) : 0);
  }
  for (uint64_t r = 0; r < w.rows->size(); ++r) {
    const uint64_t row = (*w.rows)[r];
    if (r / w.block_rows <= block) w.right &= holds_row(*w.log, *w.before, r, row);
    if (r / w.block_rows < block) continue;
    w.right &= std::memcmp(w.table->weight.data() + row * dim, w.before->weight.data() + row * dim,
                           dim * 4) == 0;
    w.right &= std::memcmp(w.table->state.data() + row * states,
                           w.before->state.data() + row * states, states * 4) == 0;
  }
  ++w.fences;
}

// A fused update gives the rows of a plain one, and no row changes before its record is there.
void update_logs_rows_first(Table& table, Random& random, const std::string& name) {
  const int64_t dim = table.view.dim;
  const Feature feature = random_feature(kRows, 60, 1500, Pooling::kSum, false, 0, random);
  Floats grad(60 * static_cast<size_t>(dim));
  for (size_t i = 0; i < grad.size(); ++i) grad[i] = random.uniform();
  const FeatureBags bags = feature.bags();
  TableLookups lookups;
  lookups.build(&bags, 1, 60, dim, kRows);
  for (const uint64_t block_rows : {uint64_t{7}, uint64_t{64}, uint64_t{256}}) {
    const Table before(table);
    Table plain(table);
    Log log(lookups.num_rows(), table.view);
    UpdateJob job;
    job.lookups = &lookups;
    job.grad = grad.data();
    job.learning_rate = 0.01f;
    job.eps = 1e-8f;
    job.table = plain.view;
    update_rows(job, 0, lookups.num_rows());
    job.table = table.view;
    job.log_block_rows = block_rows;
    job.own_log = log.columns;
    job.fence = watch_fence;
    job.flush = note_flush;
    flushed.clear();
    fused_watch = {&table, &before, &log, &lookups.rows, block_rows, 0, true};
    const uint64_t split = std::min(lookups.num_rows(), 2 * block_rows);
    update_rows(job, 0, split);
    update_rows(job, split, lookups.num_rows());
    const uint64_t blocks = (lookups.num_rows() + block_rows - 1) / block_rows;
    CHECK_CASE(fused_watch.right, name);
    CHECK_EQUAL(fused_watch.fences, 2 * blocks);
    bool durable = true;
    for (uint64_t r = 0; r < lookups.num_rows(); ++r) {
      const uint64_t begin = r / block_rows * block_rows;
      durable &= record_was_flushed(log, table, r, begin,
                                    std::min(begin + block_rows, lookups.num_rows()));
    }
    for (uint64_t b = 0; b < blocks; ++b) durable &= was_flushed(&log.done[b], 8);
    CHECK_CASE(durable, name);
    CHECK_CASE(is_untouched(log, table, lookups.num_rows()), name);
    CHECK_CASE(std::memcmp(table.weight.data(), plain.weight.data(), table.weight.size() * 4) == 0,
               name);
    CHECK_CASE(std::memcmp(table.state.data(), plain.state.data(), table.state.size() * 4) == 0,
               name);
  }
}

}  // namespace

int main() {
  for_each_table(update_logs_rows_first);
  for_each_table(copies_rows);
  for_each_table(copies_chosen_records);
  for_each_table(update_hands_rows_over);
  return check_result();
}
