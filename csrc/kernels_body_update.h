// Row update from summed gradients, and the hand-off to the next undo log. Part of kernels_body.h.
#pragma once

#include "crash_point.h"
#include "fault.h"
#include "kernels_body_grad.h"
#include "kernels_body_log.h"
#include "kernels_internal.h"
#include "kernels_vec.h"

namespace tcxl {
namespace {

// A block of rows and their gradients. A kernel sees the columns of one shape at a time.
struct Block {
  const uint64_t* rows;
  uint64_t count;
  float* grad;
  uint64_t grad_stride;
};

// w -= step * g over the vectors of a row.
template <int N, bool kTail>
TCXL_INLINE void subtract_scaled(const Row<N, kTail>*, float* w, const float* g, Vec step,
                                 const Tail& tail) {
  store_one<N, kTail>(w, load_one<N, kTail>(w, tail) - step * load_vec(g), tail);
  if constexpr (N > 1) {
    subtract_scaled(static_cast<const Row<N - 1, kTail>*>(nullptr), w + kLanes, g + kLanes, step,
                    tail);
  }
}

// torch.optim.Adagrad over the vectors of a row.
template <int N, bool kTail>
TCXL_INLINE void adagrad(const Row<N, kTail>*, float* w, float* s, const float* g,
                         Vec learning_rate, Vec eps, const Tail& tail) {
  const Vec grad = load_vec(g);
  const Vec state = load_one<N, kTail>(s, tail) + grad * grad;
  store_one<N, kTail>(s, state, tail);
  const Vec step = learning_rate * grad / (square_root(state) + eps);
  store_one<N, kTail>(w, load_one<N, kTail>(w, tail) - step, tail);
  if constexpr (N > 1) {
    adagrad(static_cast<const Row<N - 1, kTail>*>(nullptr), w + kLanes, s + kLanes, g + kLanes,
            learning_rate, eps, tail);
  }
}

TCXL_INLINE float mean_square(const float* g, int64_t dim) {
  const Tail whole(0);
  Lanes lanes;
  zero(lanes);
  for (int64_t k = 0; k < dim; k += kGroup) add_product<false>(lanes, g + k, g + k, whole);
  return sum_lanes(lanes) / static_cast<float>(dim);
}

// Adds to the state of each row and gives the step by which its gradient is multiplied. The
// divisions and square roots of a whole block run side by side, off the dependency chain of each
// row.
TCXL_INLINE void row_wise_steps(const UpdateJob& job, const Block& block, float* step) {
  for (uint64_t i = 0; i < kBlockRows; ++i) step[i] = 0;
  const auto stride = static_cast<uint64_t>(job.table.state_floats());
  for (uint64_t i = 0; i < block.count; ++i) {
    float* state = job.table.state + block.rows[i] * stride;
    step[i] = *state + mean_square(block.grad + i * block.grad_stride, job.table.dim);
    *state = step[i];
  }
  for (uint64_t i = 0; i < block.count; i += kLanes) {
    const Vec divisor = square_root(load_vec(step + i)) + splat(job.eps);
    store_vec(step + i, splat(job.learning_rate) / divisor);
  }
}

template <typename S>
TCXL_NOINLINE void apply_columns(const UpdateJob& job, const Block& block, int64_t column,
                                 int64_t columns, const float* step) {
  constexpr const typename S::RowType* kShape = nullptr;
  const Tail tail(columns);
  const auto dim = static_cast<uint64_t>(job.table.dim);
  const Vec learning_rate = splat(job.learning_rate), eps = splat(job.eps);
  float* weight = job.table.weight + column;
  const float* grad = block.grad + column;
  if (job.table.optimizer == OptimizerKind::kSgd) {
    for (uint64_t i = 0; i < block.count; ++i) {
      subtract_scaled(kShape, weight + block.rows[i] * dim, grad + i * block.grad_stride,
                      learning_rate, tail);
    }
  } else if (job.table.optimizer == OptimizerKind::kAdagrad) {
    float* state = job.table.state + column;
    const auto stride = static_cast<uint64_t>(job.table.state_floats());
    for (uint64_t i = 0; i < block.count; ++i) {
      adagrad(kShape, weight + block.rows[i] * dim, state + block.rows[i] * stride,
              grad + i * block.grad_stride, learning_rate, eps, tail);
    }
  } else {
    for (uint64_t i = 0; i < block.count; ++i) {
      subtract_scaled(kShape, weight + block.rows[i] * dim, grad + i * block.grad_stride,
                      splat(step[i]), tail);
    }
  }
}

TCXL_INLINE void apply_block(const UpdateJob& job, const Block& block) {
  const int64_t dim = job.table.dim;
  alignas(kLine) float step[kBlockRows];
  const uint64_t floats = block.count * block.grad_stride;
  if (job.grad_scale != 1.0f) {
    for (uint64_t k = 0; k < floats; ++k) block.grad[k] *= job.grad_scale;
  }
  if (job.table.optimizer == OptimizerKind::kRowWiseAdagrad) row_wise_steps(job, block, step);
  for (int64_t column = 0; column < dim; column += kGroupsMax * kGroup) {
    const int64_t columns = dim - column < kGroupsMax * kGroup ? dim - column : kGroupsMax * kGroup;
    with_shape(columns, [&](auto shape) {
      apply_columns<decltype(shape)>(job, block, column, columns, step);
    });
  }
}

// Checksums of `count` <= kGroupRows rows, and where they are kept.
TCXL_INLINE void row_checks(const TableView& table, const uint64_t* rows, uint64_t count,
                            uint32_t (&crc)[kGroupRows], float* (&kept)[kGroupRows]) {
  const auto stride = static_cast<uint64_t>(table.state_floats());
  RecordSource source[kGroupRows];
  for (uint64_t i = 0; i < kGroupRows; ++i) {
    const uint64_t row = rows[i < count ? i : 0];
    source[i] = {row, table.state + row * stride,
                 table.weight + row * static_cast<uint64_t>(table.dim)};
    kept[i] = table.state + (row + 1) * stride - 1;
  }
  record_crcs(table.check_start, source, table.state_floats() - 1, table.dim, crc);
}

// Calls use(row, checksum, where it is kept) for the rows of the block, as long as it says true.
template <typename Use>
TCXL_INLINE bool visit_checks(const TableView& table, const Block& block, const Use& use) {
  for (uint64_t i = 0; i < block.count; i += kGroupRows) {
    const uint64_t n = block.count - i < kGroupRows ? block.count - i : kGroupRows;
    uint32_t crc[kGroupRows];
    float* kept[kGroupRows];
    row_checks(table, block.rows + i, n, crc, kept);
    for (uint64_t k = 0; k < n; ++k) {
      if (!use(block.rows[i + k], crc[k], kept[k])) return false;
    }
  }
  return true;
}

// Whether no row of the block is damaged: an update would give wrong bytes a right checksum.
TCXL_NOINLINE bool is_whole(const UpdateJob& job, const Block& block) {
  return visit_checks(job.table, block, [&](uint64_t row, uint32_t crc, const float* kept) {
    const bool is_right = load_half_word(kept) == crc;
    if (!is_right) *job.damaged_row = row;
    return is_right;
  });
}

TCXL_NOINLINE void store_checks(const UpdateJob& job, const Block& block) {
  visit_checks(job.table, block, [](uint64_t, uint32_t crc, float* kept) {
    std::memcpy(kept, &crc, sizeof crc);
    return true;
  });
}

// Rows that wait to be copied to the next log: few rows of a block may repeat, and checksums want a
// full group.
struct HandOff {
  uint64_t row[kBlockRows + kGroupRows];
  uint32_t record[kBlockRows + kGroupRows];
  uint64_t count = 0;
};

TCXL_INLINE void hand_off_block(const UpdateJob& job, const uint64_t* rows,
                                const uint32_t* next_record, uint64_t count, HandOff& waiting) {
  for (uint64_t i = 0; i < count;
       ++i) {  // no branch on the record: which rows repeat is hard to predict
    waiting.row[waiting.count] = rows[i];
    waiting.record[waiting.count] = next_record[i];
    waiting.count += next_record[i] != kNoRecord;
  }
  const uint64_t whole = waiting.count / kGroupRows * kGroupRows;
  write_records(job.table, waiting.row, waiting.record, whole, job.next_log, job.flush);
  for (uint64_t i = whole; i < waiting.count; ++i) {
    waiting.row[i - whole] = waiting.row[i];
    waiting.record[i - whole] = waiting.record[i];
  }
  waiting.count -= whole;
}

// Copies rows after their update into the records that have their own index.
TCXL_INLINE void copy_after(const UpdateJob& job, const uint64_t* rows, uint64_t first,
                            uint64_t count) {
  for (uint64_t i = 0; i < count; i += kGroupRows) {
    uint32_t record[kGroupRows];
    for (uint64_t k = 0; k < kGroupRows; ++k) record[k] = static_cast<uint32_t>(first + i + k);
    const uint64_t n = count - i < kGroupRows ? count - i : kGroupRows;
    write_records(job.table, rows + i, record, n, *job.after, nullptr);
  }
}

TCXL_NOINLINE void flush_block(const UpdateJob& job, const Block& block) {
  if (has_fault(Fault::kNoRowFlush)) return;
  const auto dim = static_cast<uint64_t>(job.table.dim);
  const auto state_floats = static_cast<uint64_t>(job.table.state_floats());
  for (uint64_t i = 0; i < block.count; ++i) {
    job.flush(job.table.weight + block.rows[i] * dim, dim * 4);
    if (state_floats > 0)
      job.flush(job.table.state + block.rows[i] * state_floats, state_floats * 4);
  }
}

// The time of a part, of blocks that are sampled.
struct Lap {
  const UpdateJob& job;
  bool is_on;
  uint64_t last = 0;

  TCXL_INLINE Lap(const UpdateJob& j, bool on) : job(j), is_on(on) {
    if (is_on) last = job.clock();
  }
  TCXL_INLINE void take(uint64_t UpdateTimes::* part) {
    if (!is_on) return;
    const uint64_t now = job.clock();
    job.times->*part += now - last;
    job.times->all_ns += now - last;
    last = now;
  }
  TCXL_INLINE void take() {
    if (!is_on) return;
    const uint64_t now = job.clock();
    job.times->all_ns += now - last;
    last = now;
  }
};

TCXL_INLINE bool is_sampled(const UpdateJob& job, uint64_t block) {
  return job.times != nullptr && block % 8 == 0;
}

TCXL_INLINE void update_blocks(const UpdateJob& job, const RowLookups& lookups, uint64_t row_begin,
                               uint64_t row_end, const Ahead& ahead, HandOff& waiting) {
  GradBlock sums;
  const TableView& table = job.table;
  const uint64_t step = rows_per_block(table.dim);
  for (uint64_t r = row_begin; r < row_end; r += step) {
    const uint64_t end = r + step < row_end ? r + step : row_end;
    Lap lap(job, is_sampled(job, r / step));
    sum_grad_block(lookups, job.grad, table.dim, r, end, ahead, &sums);
    lap.take(&UpdateTimes::reduce_ns);
    const Block block{lookups.rows + r, end - r, sums.sum, padded_dim(table.dim)};
    if (table.has_check && !is_whole(job, block)) continue;
    apply_block(job, block);
    if (table.has_check) store_checks(job, block);
    lap.take();
    crash_point("update: rows");
    if (job.after != nullptr) copy_after(job, block.rows, r, block.count);
    if (job.next_record != nullptr) {
      hand_off_block(job, block.rows, job.next_record + r, block.count, waiting);
    }
    lap.take(&UpdateTimes::log_ns);
    crash_point("update: handed over");
    if (job.flush != nullptr) flush_block(job, block);
    lap.take();
  }
}

// Copies the rows of one block of the fused log; their records are persistent on return.
TCXL_NOINLINE void log_block(const UpdateJob& job, const RowLookups& lookups, uint64_t block,
                             uint64_t row_begin, uint64_t row_end) {
  uint64_t* done = job.own_log.done + block;
  if (has_fault(Fault::kFusedTagBeforeRecords)) {
    *done = block_tag(job.own_log, block);
    if (job.flush != nullptr) job.flush(done, sizeof *done);
    job.fence();
  }
  copy_rows(job.table, lookups.rows, row_begin, row_end, lookups.num_rows, job.own_log, job.flush);
  if (!has_fault(Fault::kNoRecordFence)) job.fence();
  __atomic_store_n(done, block_tag(job.own_log, block), __ATOMIC_RELEASE);
  if (has_fault(Fault::kFusedRowsBeforeTag)) return;
  if (job.flush != nullptr) job.flush(done, sizeof *done);
  job.fence();
}

void update_rows_kernel(const UpdateJob& job, const RowLookups& lookups, uint64_t row_begin,
                        uint64_t row_end) {
  HandOff waiting;
  const TableView& table = job.table;
  if (job.log_block_rows > 0) {
    const uint64_t step = job.log_block_rows;
    for (uint64_t r = row_begin; r < row_end; r += step) {
      const uint64_t end = r + step < row_end ? r + step : row_end;
      Lap lap(job, is_sampled(job, r / step));
      log_block(job, lookups, r / step, r, end);
      lap.take(&UpdateTimes::log_ns);
      update_blocks(job, lookups, r, end, Ahead{}, waiting);
    }
  } else {
    const Ahead ahead{table.weight, table.state, table.dim, table.state_floats()};
    update_blocks(job, lookups, row_begin, row_end, ahead, waiting);
  }
  write_records(table, waiting.row, waiting.record, waiting.count, job.next_log, job.flush);
}

}  // namespace
}  // namespace tcxl
