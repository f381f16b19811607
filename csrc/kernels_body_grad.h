// Gradient reduce: the sum of each distinct row's gradients. Part of kernels_body.h.
#pragma once

#include "kernels_internal.h"
#include "kernels_vec.h"

namespace tcxl {
namespace {

using internal::RowLookups;

// Prefetch distances in rows or lookups; measured with benchmarks/native/kernels_bench.cc.
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

template <bool kWide>
TCXL_INLINE uint64_t row_of_lookup(const RowLookups& lookups, uint64_t i) {
  if constexpr (kWide) return lookups.wide[i].row;
  return lookups.packed[i] >> 32;
}

// The table that the update of these rows will touch, prefetched meanwhile. Null pointers: nothing.
struct Ahead {
  const float* weight = nullptr;
  const float* state = nullptr;
  int64_t dim = 0, state_floats = 0;
};

TCXL_INLINE void prefetch_row(const Ahead& table, uint64_t row) {
  if (table.weight == nullptr) return;
  prefetch_far(table.weight + row * static_cast<uint64_t>(table.dim), table.dim * 4);
  prefetch_far(table.state + row * static_cast<uint64_t>(table.state_floats),
               table.state_floats * 4);
}

template <typename S, bool kWide>
TCXL_INLINE void prefetch_grad(const RowLookups& lookups, const float* grad, uint64_t i) {
  const uint64_t ahead =
      i + kGradAhead < lookups.num_lookups ? i + kGradAhead : lookups.num_lookups - 1;
  const float* row = grad + grad_offset<kWide>(lookups, ahead);
  if constexpr (S::groups < 4) {
    prefetch_near(row,
                  S::groups * kLine);  // one table's share of the gradient fits the second level
  } else {
    prefetch_far(row, S::groups * kLine);
  }
}

template <typename S, bool kWide>
TCXL_INLINE void add_grad(typename S::RowType& sum, const RowLookups& lookups, const float* grad,
                          uint64_t i, const Tail& tail) {
  const float* row = grad + grad_offset<kWide>(lookups, i);
  if constexpr (kWide) {
    add_scaled(sum, row, splat(lookups.wide[i].coefficient), tail);
  } else {
    add(sum, row, tail);
  }
}

// Rows of many lookups: one after the other, in chunks.
template <typename S, bool kWide>
TCXL_NOINLINE void sum_long_rows(const RowLookups& lookups, const float* grad, int64_t columns,
                                 uint64_t row_begin, uint64_t row_end, const Ahead& table,
                                 float* out, uint64_t out_stride) {
  constexpr uint64_t kChunk = kSumChunk;
  const Tail tail(columns);
  for (uint64_t r = row_begin; r < row_end; ++r, out += out_stride) {
    prefetch_row(
        table,
        lookups.rows[r + kRowAhead < lookups.num_rows ? r + kRowAhead : lookups.num_rows - 1]);
    const uint64_t end = lookups.begin[r + 1];
    typename S::RowType total;
    zero(total);
    for (uint64_t i = lookups.begin[r]; i < end;) {
      const uint64_t chunk_end = end - i < kChunk ? end : i + kChunk;
      typename S::RowType sum;
      zero(sum);
      for (; i < chunk_end; ++i) {
        prefetch_grad<S, kWide>(lookups, grad, i);
        add_grad<S, kWide>(sum, lookups, grad, i, tail);
      }
      add_row(total, sum);
    }
    store_whole(total, out);
  }
}

// Rows of few lookups, at most one chunk each: one loop over the lookups without a branch on where
// a row ends, which could not be predicted. Each lookup stores the sum so far; the last store of a
// row is its sum.
template <typename S, bool kWide>
TCXL_NOINLINE void sum_short_rows(const RowLookups& lookups, const float* grad, int64_t columns,
                                  uint64_t row_begin, uint64_t row_end, const Ahead& table,
                                  float* out, uint64_t out_stride) {
  const Tail tail(columns);
  const uint64_t end = lookups.begin[row_end], last = lookups.num_lookups - 1;
  uint64_t before = ~row_of_lookup<kWide>(lookups, lookups.begin[row_begin]);
  uint64_t at = 0 - out_stride;
  typename S::RowType sum;
  zero(sum);
  for (uint64_t i = lookups.begin[row_begin]; i < end; ++i) {
    prefetch_grad<S, kWide>(lookups, grad, i);
    prefetch_row(table, row_of_lookup<kWide>(lookups, i + kRowAhead < last ? i + kRowAhead : last));
    const uint64_t row = row_of_lookup<kWide>(lookups, i);
    at += row != before ? out_stride : 0;
    keep_if(sum, row == before);
    before = row;
    add_grad<S, kWide>(sum, lookups, grad, i, tail);
    store_whole(sum, out + at);
  }
}

// Sums the gradients of rows [row_begin, row_end), at most rows_per_block, into `block`.
TCXL_INLINE void sum_grad_block(const RowLookups& lookups, const float* grad, int64_t dim,
                                uint64_t row_begin, uint64_t row_end, Ahead table,
                                GradBlock* block) {
  constexpr uint64_t kShortMean = 4;  // lookups a row
  static_assert(kShortMean * kBlockRows <= kSumChunk);
  const uint64_t num_lookups = lookups.begin[row_end] - lookups.begin[row_begin];
  const bool is_short = num_lookups < kShortMean * (row_end - row_begin);
  const uint64_t stride = padded_dim(dim);
  for (int64_t column = 0; column < dim; column += kGroupsMax * kGroup) {
    const int64_t columns = dim - column < kGroupsMax * kGroup ? dim - column : kGroupsMax * kGroup;
    float* out = block->sum + column;
    with_shape(columns, [&](auto shape) {
      using S = decltype(shape);
      if (lookups.wide == nullptr) {
        const auto sum = is_short ? sum_short_rows<S, false> : sum_long_rows<S, false>;
        sum(lookups, grad + column, columns, row_begin, row_end, table, out, stride);
      } else {
        const auto sum = is_short ? sum_short_rows<S, true> : sum_long_rows<S, true>;
        sum(lookups, grad + column, columns, row_begin, row_end, table, out, stride);
      }
    });
    table = Ahead{};
  }
}

void row_grad_norm_sq_kernel(const RowLookups& lookups, const float* grad, int64_t dim,
                             uint64_t row_begin, uint64_t row_end, double* row_norm_sq) {
  GradBlock block;
  const uint64_t stride = padded_dim(dim);
  const uint64_t step = rows_per_block(dim);
  for (uint64_t r = row_begin; r < row_end; r += step) {
    const uint64_t end = r + step < row_end ? r + step : row_end;
    sum_grad_block(lookups, grad, dim, r, end, Ahead{}, &block);
    for (uint64_t i = r; i < end; ++i) {
      double lanes[kGroup] = {};
      const float* g = block.sum + (i - r) * stride;
      for (uint64_t k = 0; k < stride; k += kGroup) {
        for (uint64_t j = 0; j < kGroup; ++j) {
          lanes[j] += static_cast<double>(g[k + j]) * static_cast<double>(g[k + j]);
        }
      }
      for (int half = kGroup / 2; half > 0; half /= 2) {
        for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
      }
      row_norm_sq[i - row_begin] = lanes[0];
    }
  }
}

}  // namespace
}  // namespace tcxl
