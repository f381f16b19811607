// Gradient reduce + row update. Part of kernels_body.h.
#pragma once

#include "crash_point.h"
#include "kernels_body_log.h"
#include "kernels_internal.h"
#include "kernels_vec.h"

namespace tcxl {
namespace {

using internal::RowLookups;

// Prefetch distances, in distinct rows and in lookups; measured with
// benchmarks/native/kernels_bench.cc.
constexpr uint64_t kRowAhead = 24;
constexpr uint64_t kGradAhead = 16;

// Summed gradients of a block of rows, each padded to whole groups, kept in cache for the update
// that follows.
constexpr uint64_t kBlockRows = 64;
constexpr uint64_t kBlockFloats = 2048;

struct GradBlock {
  alignas(kLine) float sum[kBlockFloats];
};

TCXL_INLINE uint64_t padded_dim(int64_t dim) {
  return (static_cast<uint64_t>(dim) + kGroup - 1) / kGroup * kGroup;
}

TCXL_INLINE uint64_t rows_per_block(int64_t dim) {
  const uint64_t rows = kBlockFloats / padded_dim(dim);
  return rows < kBlockRows ? rows : kBlockRows;
}

template <bool kWide>
TCXL_INLINE uint64_t grad_offset(const RowLookups& lookups, uint64_t i) {
  if constexpr (kWide) return lookups.wide[i].grad_offset;
  return lookups.packed[i] & 0xffffffffu;
}

template <typename S, bool kWide>
TCXL_INLINE typename S::RowType sum_grad_chunk(const RowLookups& lookups, const float* grad,
                                               uint64_t begin, uint64_t end, const Tail& tail) {
  typename S::RowType sum;
  zero(sum);
  const uint64_t last = lookups.num_lookups - 1;
  for (uint64_t i = begin; i < end; ++i) {
    const uint64_t ahead = i + kGradAhead < last ? i + kGradAhead : last;
    prefetch_near(grad + grad_offset<kWide>(lookups, ahead), S::groups * kLine);
    const float* row = grad + grad_offset<kWide>(lookups, i);
    if constexpr (kWide) {
      add_scaled(sum, row, splat(lookups.wide[i].coefficient), tail);
    } else {
      add(sum, row, tail);
    }
  }
  return sum;
}

template <typename S, bool kWide>
TCXL_NOINLINE void sum_more_grad_chunks(const RowLookups& lookups, const float* grad,
                                        uint64_t begin, uint64_t end, const Tail& tail,
                                        typename S::RowType* sum) {
  constexpr uint64_t kChunk = kSumChunk;
  typename S::RowType total = *sum;
  for (uint64_t i = begin; i < end; i += kChunk) {
    add_row(total,
            sum_grad_chunk<S, kWide>(lookups, grad, i, i + kChunk < end ? i + kChunk : end, tail));
  }
  *sum = total;
}

// What the update of a block will touch, prefetched while gradients are summed. Null pointers:
// nothing.
struct Ahead {
  const float* weight = nullptr;
  const float* state = nullptr;
  int64_t dim = 0, state_dim = 0;
};

template <typename S, bool kWide>
TCXL_INLINE void sum_grads(const RowLookups& lookups, const float* grad, int64_t columns,
                           uint64_t row_begin, uint64_t row_end, float scale, const Ahead& next,
                           float* out, uint64_t out_stride) {
  constexpr uint64_t kChunk = kSumChunk;
  const Tail tail(columns);
  const Vec factor = splat(scale);
  for (uint64_t r = row_begin; r < row_end; ++r, out += out_stride) {
    if (next.weight != nullptr) {
      const uint64_t ahead =
          r + kRowAhead < lookups.num_rows ? r + kRowAhead : lookups.num_rows - 1;
      const uint64_t row = lookups.rows[ahead];
      prefetch_far(next.weight + row * static_cast<uint64_t>(next.dim), next.dim * 4);
      prefetch_far(next.state + row * static_cast<uint64_t>(next.state_dim), next.state_dim * 4);
    }
    const uint64_t begin = lookups.begin[r], end = lookups.begin[r + 1];
    typename S::RowType sum = sum_grad_chunk<S, kWide>(
        lookups, grad, begin, end - begin > kChunk ? begin + kChunk : end, tail);
    if (end - begin > kChunk) {
      typename S::RowType total = sum;
      sum_more_grad_chunks<S, kWide>(lookups, grad, begin + kChunk, end, tail, &total);
      sum = total;
    }
    store_padded(sum, out, factor);
  }
}

// Sums the gradients of rows [row_begin, row_end), at most rows_per_block, into `block`.
TCXL_NOINLINE void sum_grad_block(const RowLookups& lookups, const float* grad, int64_t dim,
                                  uint64_t row_begin, uint64_t row_end, float scale, Ahead next,
                                  GradBlock* block) {
  for (int64_t column = 0; column < dim; column += kGroupsMax * kGroup) {
    const int64_t left = dim - column;
    const int64_t columns = left < kGroupsMax * kGroup ? left : kGroupsMax * kGroup;
    float* out = block->sum + column;
    with_shape(columns, [&](auto shape) {
      using S = decltype(shape);
      if (lookups.wide == nullptr) {
        sum_grads<S, false>(lookups, grad + column, columns, row_begin, row_end, scale, next, out,
                            padded_dim(dim));
      } else {
        sum_grads<S, true>(lookups, grad + column, columns, row_begin, row_end, scale, next, out,
                           padded_dim(dim));
      }
    });
    next = Ahead{};
  }
}

void row_grad_norm_sq_kernel(const RowLookups& lookups, const float* grad, int64_t dim,
                             uint64_t row_begin, uint64_t row_end, double* row_norm_sq) {
  GradBlock block;
  const uint64_t stride = padded_dim(dim);
  for (uint64_t r = row_begin; r < row_end; r += rows_per_block(dim)) {
    const uint64_t end = r + rows_per_block(dim) < row_end ? r + rows_per_block(dim) : row_end;
    sum_grad_block(lookups, grad, dim, r, end, 1.0f, Ahead{}, &block);
    for (uint64_t i = r; i < end; ++i) {
      double lanes[kGroup] = {};
      const float* g = block.sum + (i - r) * stride;
      for (uint64_t k = 0; k < stride; k += kGroup) {
        for (uint64_t j = 0; j < kGroup; ++j)
          lanes[j] += static_cast<double>(g[k + j]) * static_cast<double>(g[k + j]);
      }
      for (int step = kGroup / 2; step > 0; step /= 2) {
        for (int j = 0; j < step; ++j) lanes[j] += lanes[j + step];
      }
      row_norm_sq[i - row_begin] = lanes[0];
    }
  }
}

// Row update rules over columns [0, dim) of one row; g is padded to whole groups.
struct SgdRule {
  Vec learning_rate;
  TCXL_INLINE Vec operator()(Vec w, Vec g) const { return w - learning_rate * g; }
};

template <typename Rule>
TCXL_INLINE void update_row(float* w, const float* g, int64_t dim, const Tail& tail,
                            const Rule& rule) {
  int64_t k = 0;
  for (; k + kLanes <= dim; k += kLanes) store_vec(w + k, rule(load_vec(w + k), load_vec(g + k)));
  if (k < dim) {
    const int at = static_cast<int>(k % kGroup);
    tail.store(w + k, rule(tail.load(w + k, at), load_vec(g + k)), at);
  }
}

TCXL_INLINE void update_row_adagrad(float* w, float* s, const float* g, int64_t dim,
                                    const Tail& tail, Vec learning_rate, Vec eps) {
  int64_t k = 0;
  for (; k + kLanes <= dim; k += kLanes) {
    const Vec grad = load_vec(g + k);
    const Vec state = load_vec(s + k) + grad * grad;
    store_vec(s + k, state);
    store_vec(w + k, load_vec(w + k) - learning_rate * grad / (square_root(state) + eps));
  }
  if (k < dim) {
    const int at = static_cast<int>(k % kGroup);
    const Vec grad = load_vec(g + k);
    const Vec state = tail.load(s + k, at) + grad * grad;
    tail.store(s + k, state, at);
    const Vec step = learning_rate * grad / (square_root(state) + eps);
    tail.store(w + k, tail.load(w + k, at) - step, at);
  }
}

TCXL_INLINE float mean_square(const float* g, int64_t dim) {
  const Tail whole(0);
  Lanes lanes;
  zero(lanes);
  for (int64_t k = 0; k < dim; k += kGroup) add_product<false>(lanes, g + k, g + k, whole);
  return sum_lanes(lanes) / static_cast<float>(dim);
}

struct Block {
  const uint64_t* rows;
  uint64_t count;
  const float* grad;
  uint64_t grad_stride;
};

TCXL_INLINE void apply_sgd(const UpdateJob& job, const Block& block) {
  const int64_t dim = job.table.dim;
  const Tail tail(dim);
  const SgdRule rule{splat(job.learning_rate)};
  for (uint64_t i = 0; i < block.count; ++i) {
    float* w = job.table.weight + block.rows[i] * static_cast<uint64_t>(dim);
    update_row(w, block.grad + i * block.grad_stride, dim, tail, rule);
  }
}

TCXL_INLINE void apply_adagrad(const UpdateJob& job, const Block& block) {
  const int64_t dim = job.table.dim;
  const Tail tail(dim);
  const Vec learning_rate = splat(job.learning_rate), eps = splat(job.eps);
  for (uint64_t i = 0; i < block.count; ++i) {
    const uint64_t first = block.rows[i] * static_cast<uint64_t>(dim);
    const float* g = block.grad + i * block.grad_stride;
    update_row_adagrad(job.table.weight + first, job.table.state + first, g, dim, tail,
                       learning_rate, eps);
  }
}

// The divisions and square roots of a whole block run side by side, off the dependency chain of
// each row.
TCXL_INLINE void apply_row_wise_adagrad(const UpdateJob& job, const Block& block) {
  const int64_t dim = job.table.dim;
  const Tail tail(dim);
  alignas(kLine) float state[kBlockRows];
  for (uint64_t i = 0; i < kBlockRows; ++i) state[i] = 0;
  for (uint64_t i = 0; i < block.count; ++i) {
    float* s = job.table.state + block.rows[i];
    state[i] = *s + mean_square(block.grad + i * block.grad_stride, dim);
    *s = state[i];
  }
  for (uint64_t i = 0; i < block.count; i += kLanes) {
    const Vec divisor = square_root(load_vec(state + i)) + splat(job.eps);
    store_vec(state + i, splat(job.learning_rate) / divisor);
  }
  for (uint64_t i = 0; i < block.count; ++i) {
    float* w = job.table.weight + block.rows[i] * static_cast<uint64_t>(dim);
    update_row(w, block.grad + i * block.grad_stride, dim, tail, SgdRule{splat(state[i])});
  }
}

TCXL_INLINE void hand_off_block(const UpdateJob& job, const uint64_t* rows,
                                const uint32_t* next_record, uint64_t count) {
  uint64_t source[kBlockRows];
  uint32_t record[kBlockRows];
  uint64_t n = 0;
  for (uint64_t i = 0; i < count;
       ++i) {  // no branch on the record: which rows repeat is hard to predict
    source[n] = rows[i];
    record[n] = next_record[i];
    n += next_record[i] != kNoRecord;
  }
  write_records(job.table, source, record, n, job.next_log, job.flush);
}

TCXL_NOINLINE void flush_block(const UpdateJob& job, const Block& block) {
  const auto dim = static_cast<uint64_t>(job.table.dim);
  const auto state_floats = static_cast<uint64_t>(state_dim(job.table.optimizer, job.table.dim));
  for (uint64_t i = 0; i < block.count; ++i) {
    job.flush(job.table.weight + block.rows[i] * dim, dim * 4);
    if (state_floats > 0)
      job.flush(job.table.state + block.rows[i] * state_floats, state_floats * 4);
  }
}

void update_rows_kernel(const UpdateJob& job, const RowLookups& lookups, uint64_t row_begin,
                        uint64_t row_end) {
  GradBlock sums;
  const TableView& table = job.table;
  const Ahead next{table.weight, table.state, table.dim, state_dim(table.optimizer, table.dim)};
  const uint64_t step = rows_per_block(table.dim);
  for (uint64_t r = row_begin; r < row_end; r += step) {
    const uint64_t end = r + step < row_end ? r + step : row_end;
    sum_grad_block(lookups, job.grad, table.dim, r, end, job.grad_scale, next, &sums);
    const Block block{lookups.rows + r, end - r, sums.sum, padded_dim(table.dim)};
    switch (table.optimizer) {
      case OptimizerKind::kSgd:
        apply_sgd(job, block);
        break;
      case OptimizerKind::kAdagrad:
        apply_adagrad(job, block);
        break;
      case OptimizerKind::kRowWiseAdagrad:
        apply_row_wise_adagrad(job, block);
        break;
    }
    crash_point("update: rows");
    if (job.next_record != nullptr)
      hand_off_block(job, block.rows, job.next_record + r, block.count);
    crash_point("update: handed over");
    if (job.flush != nullptr) flush_block(job, block);
  }
}

}  // namespace
}  // namespace tcxl
