// Lookup + reduce of bags. Part of kernels_body.h.
#pragma once

#include "kernels.h"
#include "kernels_vec.h"

namespace tcxl {
namespace {

// Prefetch distance in lookups, across the borders of bags; measured with
// benchmarks/native/kernels_bench.cc.
constexpr int64_t kLookupAhead = 32;
constexpr int64_t kOutAhead = 8;  // bags: pooled output is seldom in cache when it is stored

struct Gather {
  const float* weight;  // first column of the block in row 0
  int64_t dim;
  const int64_t* ids;
  const float* coefficients;  // nullptr: all 1
  int64_t last;               // last lookup of the range, for prefetching
};

template <typename S, bool kWeighted>
TCXL_INLINE typename S::RowType gather_chunk(const Gather& in, int64_t begin, int64_t end,
                                             const Tail& tail) {
  typename S::RowType sum;
  zero(sum);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t ahead = i + kLookupAhead < in.last ? i + kLookupAhead : in.last;
    prefetch_far(in.weight + in.ids[ahead] * in.dim, S::groups * kLine);
    const float* row = in.weight + in.ids[i] * in.dim;
    if constexpr (kWeighted) {
      add_scaled(sum, row, splat(in.coefficients[i]), tail);
    } else {
      add(sum, row, tail);
    }
  }
  return sum;
}

template <typename S, bool kWeighted>
TCXL_NOINLINE void gather_more_chunks(const Gather& in, int64_t begin, int64_t end,
                                      const Tail& tail, typename S::RowType* sum) {
  typename S::RowType total = *sum;
  for (int64_t i = begin; i < end; i += kSumChunk) {
    add_row(total,
            gather_chunk<S, kWeighted>(in, i, i + kSumChunk < end ? i + kSumChunk : end, tail));
  }
  *sum = total;
}

template <typename S, bool kWeighted>
void lookup_columns(const Gather& in, const FeatureBags& bags, int64_t bag_begin, int64_t bag_end,
                    int64_t columns, float* out, int64_t out_stride) {
  const Tail tail(columns);
  const bool is_mean = bags.pooling == Pooling::kMean;
  for (int64_t b = bag_begin; b < bag_end; ++b) {
    const int64_t begin = bags.offsets[b], end = bags.offsets[b + 1];
    const int64_t length = end - begin;
    prefetch_far(out + (b + kOutAhead < bag_end ? b + kOutAhead : b) * out_stride,
                 S::groups * kLine);
    typename S::RowType sum =
        gather_chunk<S, kWeighted>(in, begin, length > kSumChunk ? begin + kSumChunk : end, tail);
    if (length > kSumChunk) {
      typename S::RowType total = sum;
      gather_more_chunks<S, kWeighted>(in, begin + kSumChunk, end, tail, &total);
      sum = total;
    }
    if (is_mean && length > 1) divide(sum, splat(static_cast<float>(length)));
    store(sum, out + b * out_stride, tail);
  }
}

void lookup_kernel(const TableView& table, const FeatureBags& bags, int64_t bag_begin,
                   int64_t bag_end, float* out, int64_t out_stride) {
  if (bag_begin >= bag_end) return;
  for (int64_t column = 0; column < table.dim; column += kGroupsMax * kGroup) {
    const int64_t left = table.dim - column;
    const int64_t columns = left < kGroupsMax * kGroup ? left : kGroupsMax * kGroup;
    const Gather in{table.weight + column, table.dim, bags.ids, bags.weights,
                    bags.offsets[bag_end] - 1};
    float* out_columns = out + bags.column + column;
    with_shape(columns, [&](auto shape) {
      using S = decltype(shape);
      if (bags.weights == nullptr) {
        lookup_columns<S, false>(in, bags, bag_begin, bag_end, columns, out_columns, out_stride);
      } else {
        lookup_columns<S, true>(in, bags, bag_begin, bag_end, columns, out_columns, out_stride);
      }
    });
  }
}

TCXL_INLINE float dot(const float* a, const float* b, int64_t dim) {
  const Tail tail(dim);
  Lanes lanes;
  zero(lanes);
  int64_t k = 0;
  for (; k + kGroup <= dim; k += kGroup) add_product<false>(lanes, a + k, b + k, tail);
  if (k < dim) add_product<true>(lanes, a + k, b + k, tail);
  return sum_lanes(lanes);
}

void per_sample_weight_grad_kernel(const TableView& table, const FeatureBags& bags,
                                   int64_t bag_begin, int64_t bag_end, const float* grad,
                                   int64_t grad_stride, float* weight_grad) {
  if (bag_begin >= bag_end) return;
  const int64_t last = bags.offsets[bag_end] - 1;
  for (int64_t b = bag_begin; b < bag_end; ++b) {
    const int64_t begin = bags.offsets[b], end = bags.offsets[b + 1];
    const bool is_mean = bags.pooling == Pooling::kMean && end - begin > 1;
    const float coefficient = is_mean ? 1.0f / static_cast<float>(end - begin) : 1.0f;
    const float* bag_grad = grad + b * grad_stride + bags.column;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t ahead = i + kLookupAhead < last ? i + kLookupAhead : last;
      prefetch_far(table.weight + bags.ids[ahead] * table.dim, table.dim * 4);
      weight_grad[i] =
          coefficient * dot(bag_grad, table.weight + bags.ids[i] * table.dim, table.dim);
    }
  }
}

}  // namespace
}  // namespace tcxl
