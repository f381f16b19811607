// Radix sort of lookups by row. Part of kernels_body.h (here for the shift and compress
// instructions).
//
// A key is row << 32 | payload. Only the row is compared and equal rows keep their order. Long
// inputs are first split by the leading bits into parts that fit the first-level cache: scattering
// a whole batch over more than a thousand places misses cache and TLB on nearly every store.
#pragma once

#include "kernels_internal.h"
#include "kernels_vec.h"

namespace tcxl {
namespace {

using internal::SortPlan;

constexpr int kPayloadBits = 32;

TCXL_INLINE void starts_from_counts(uint32_t* counts, uint64_t n) {
  uint32_t sum = 0;
  for (uint64_t k = 0; k < n; ++k) {
    const uint32_t count = counts[k];
    counts[k] = sum;
    sum += count;
  }
}

TCXL_INLINE void scatter(const uint64_t* from, uint64_t n, int shift, uint64_t mask, uint32_t* next,
                         uint64_t* to) {
  for (uint64_t i = 0; i < n; ++i) {
    const uint64_t key = from[i];
    to[next[key >> shift & mask]++] = key;
  }
}

// Sorts by P digits of `bits` bits, the least significant at bit `kPayloadBits`. Moves between
// `keys` and `spare` and ends in `to`, which may be `keys` when P is even and `spare` when P is
// odd.
template <int P>
TCXL_INLINE void sort_digits(uint64_t* keys, uint64_t* spare, uint64_t* to, uint64_t n, int bits,
                             uint32_t* counts) {
  const uint64_t buckets = uint64_t{1} << bits, mask = buckets - 1;
  std::memset(counts, 0, P * buckets * sizeof(uint32_t));
  for (uint64_t i = 0; i < n; ++i) {
    const uint64_t row = keys[i] >> kPayloadBits;
    for (int pass = 0; pass < P; ++pass)
      ++counts[static_cast<uint64_t>(pass) * buckets + (row >> (pass * bits) & mask)];
  }
  for (int pass = 0; pass < P; ++pass) {
    uint32_t* next = counts + static_cast<uint64_t>(pass) * buckets;
    starts_from_counts(next, buckets);
    uint64_t* from = pass % 2 == 0 ? keys : spare;
    uint64_t* other = pass % 2 == 0 ? spare : keys;
    scatter(from, n, kPayloadBits + pass * bits, mask, next, pass == P - 1 ? to : other);
  }
}

TCXL_NOINLINE void sort_digits(int passes, uint64_t* keys, uint64_t* spare, uint64_t* to,
                               uint64_t n, int bits, uint32_t* counts) {
  switch (passes) {
    case 1:
      return sort_digits<1>(keys, spare, to, n, bits, counts);
    case 2:
      return sort_digits<2>(keys, spare, to, n, bits, counts);
    case 3:
      return sort_digits<3>(keys, spare, to, n, bits, counts);
    default:
      return sort_digits<4>(keys, spare, to, n, bits, counts);
  }
}

// One digit with few values: four parts of the input are counted and moved side by side, because
// counting the same value twice in a row has to wait for the first store.
TCXL_NOINLINE void sort_few_rows(const uint64_t* keys, uint64_t* to, uint64_t n, uint64_t buckets,
                                 uint32_t* counts) {
  const uint64_t quarter = n / 4;
  uint32_t *a = counts, *b = a + buckets, *c = b + buckets, *d = c + buckets;
  const uint64_t *ka = keys, *kb = ka + quarter, *kc = kb + quarter, *kd = kc + quarter;
  std::memset(counts, 0, 4 * buckets * sizeof(uint32_t));
  for (uint64_t i = 0; i < quarter; ++i) {
    ++a[ka[i] >> kPayloadBits];
    ++b[kb[i] >> kPayloadBits];
    ++c[kc[i] >> kPayloadBits];
    ++d[kd[i] >> kPayloadBits];
  }
  for (uint64_t i = 4 * quarter; i < n; ++i) ++d[keys[i] >> kPayloadBits];
  uint32_t sum = 0;
  for (uint64_t k = 0; k < buckets; ++k) {
    for (uint32_t* part : {a, b, c, d}) {
      const uint32_t count = part[k];
      part[k] = sum;
      sum += count;
    }
  }
  for (uint64_t i = 0; i < quarter; ++i) {
    to[a[ka[i] >> kPayloadBits]++] = ka[i];
    to[b[kb[i] >> kPayloadBits]++] = kb[i];
    to[c[kc[i] >> kPayloadBits]++] = kc[i];
    to[d[kd[i] >> kPayloadBits]++] = kd[i];
  }
  for (uint64_t i = 4 * quarter; i < n; ++i) to[d[keys[i] >> kPayloadBits]++] = keys[i];
}

// Sorts `n` keys. They come in `spare` if plan.starts_in_spare, else in `keys`, and end in `keys`;
// `part` has room for n keys too when plan.leading_bits > 0; `counts` for plan.num_counts.
void sort_keys_kernel(const SortPlan& plan, uint64_t* keys, uint64_t* spare, uint64_t* part,
                      uint64_t n, uint32_t* counts) {
  if (n == 0 || plan.passes == 0) return;
  if (plan.is_few_rows) return sort_few_rows(spare, keys, n, uint64_t{1} << plan.bits, counts);
  if (plan.leading_bits == 0) {
    uint64_t* from = plan.starts_in_spare ? spare : keys;
    return sort_digits(plan.passes, from, plan.starts_in_spare ? keys : spare, keys, n, plan.bits,
                       counts);
  }
  const uint64_t parts = uint64_t{1} << plan.leading_bits;
  const int shift = kPayloadBits + plan.passes * plan.bits;
  uint32_t* end = counts;  // of each part, after the scatter
  std::memset(end, 0, parts * sizeof(uint32_t));
  for (uint64_t i = 0; i < n; ++i) ++end[keys[i] >> shift];
  starts_from_counts(end, parts);
  scatter(keys, n, shift, parts - 1, end, spare);
  uint64_t begin = 0;
  for (uint64_t p = 0; p < parts; ++p) {
    sort_digits(plan.passes, spare + begin, part, keys + begin, end[p] - begin, plan.bits,
                counts + parts);
    begin = end[p];
  }
}

uint64_t count_rows_kernel(const uint64_t* keys, uint64_t n) {
  uint64_t distinct = n > 0 ? 1 : 0;
  for (uint64_t i = 1; i < n; ++i)
    distinct += keys[i] >> kPayloadBits != keys[i - 1] >> kPayloadBits;
  return distinct;
}

// The `count` distinct rows of sorted keys and where each begins.
void find_rows_kernel(const uint64_t* keys, uint64_t n, uint64_t count, uint64_t* rows,
                      uint64_t* begin) {
  if (n == 0) return;
  rows[0] = keys[0] >> kPayloadBits;
  begin[0] = 0;
  uint64_t r = 1, i = 1;
#if TCXL_LANES == 16
  __m512i at = _mm512_setr_epi64(1, 2, 3, 4, 5, 6, 7, 8);
  for (; i + 8 <= n && r + 8 <= count;
       i += 8) {  // whole stores: what is too much is overwritten by the next ones
    const __m512i row = _mm512_maskz_srli_epi64(0xff, _mm512_loadu_si512(keys + i), kPayloadBits);
    const __m512i before =
        _mm512_maskz_srli_epi64(0xff, _mm512_loadu_si512(keys + i - 1), kPayloadBits);
    const __mmask8 is_first = _mm512_cmpneq_epi64_mask(row, before);
    _mm512_storeu_si512(rows + r, _mm512_maskz_compress_epi64(is_first, row));
    _mm512_storeu_si512(begin + r, _mm512_maskz_compress_epi64(is_first, at));
    at = _mm512_add_epi64(at, _mm512_set1_epi64(8));
    r += static_cast<unsigned>(__builtin_popcount(is_first));
  }
#else
  (void)count;
#endif
  for (; i < n; ++i) {
    const uint64_t row = keys[i] >> kPayloadBits;
    if (row == keys[i - 1] >> kPayloadBits) continue;
    rows[r] = row;
    begin[r++] = i;
  }
}

}  // namespace
}  // namespace tcxl
