// The kernels, one source for every vector width: included once by each of kernels_scalar.cc,
// kernels_avx2.cc and kernels_avx512.cc, which define TCXL_LANES and are compiled with their own
// instruction set.
//
// Everything here has internal linkage and nothing instantiates an inline function of the standard
// library: the linker keeps one copy of such a function, and a copy with AVX-512 in it would then
// run on lesser CPUs.
#pragma once

#include "kernels_body_correct.h"
#include "kernels_body_crc.h"
#include "kernels_body_grad.h"
#include "kernels_body_log.h"
#include "kernels_body_lookup.h"
#include "kernels_body_sort.h"
#include "kernels_body_update.h"
#include "kernels_internal.h"

namespace tcxl {
namespace {

bool has_non_finite_kernel(const float* values, uint64_t n) {
  constexpr uint64_t kBlock = 4096;  // floats between two looks at the result
  for (uint64_t begin = 0; begin < n; begin += kBlock) {
    const uint64_t end = begin + kBlock < n ? begin + kBlock : n;
    uint32_t seen = 0;  // top bit: an exponent of all ones was seen
    for (uint64_t i = begin; i < end; ++i) {
      uint32_t bits;
      std::memcpy(&bits, values + i, sizeof(bits));
      seen |= (bits & 0x7fffffffu) + 0x00800000u;
    }
    if (seen >> 31 != 0) return true;
  }
  return false;
}

TCXL_INLINE uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

void initialize_rows_kernel(float* weight, int64_t dim, uint64_t row_begin, uint64_t row_end,
                            uint64_t seed, uint64_t table_key, float scale) {
  const uint64_t table_hash = mix(seed ^ table_key);
  const auto columns = static_cast<uint64_t>(dim);
  for (uint64_t row = row_begin; row < row_end; ++row) {
    const uint64_t row_hash = mix(table_hash ^ row);
    float* w = weight + row * columns;
    for (uint64_t column = 0; column < columns; ++column) {
      const auto u = static_cast<int32_t>(mix(row_hash ^ column) >> 40);
      // 2 u - 1 is exact, so the only rounding is that of the product and scale itself is never
      // reached.
      w[column] = (static_cast<float>(u) * 0x1p-23f - 1.0f) * scale;
    }
  }
}

constexpr internal::KernelTable kKernels = {
    .lookup = lookup_kernel,
    .correct_lookups = correct_lookups_kernel,
    .per_sample_weight_grad = per_sample_weight_grad_kernel,
    .copy_rows_to_log = copy_rows_to_log_kernel,
    .update_rows = update_rows_kernel,
    .row_grad_norm_sq = row_grad_norm_sq_kernel,
    .has_non_finite = has_non_finite_kernel,
    .initialize_rows = initialize_rows_kernel,
    .sort_keys = sort_keys_kernel,
    .count_rows = count_rows_kernel,
    .find_rows = find_rows_kernel,
};

}  // namespace
}  // namespace tcxl
