// Rows of floats in registers, the same source for every vector width. Included by kernels_body.h
// only, with TCXL_LANES = floats of one native vector (4, 8 or 16). Everything has internal
// linkage: each ISA owns a copy.
//
// Element-wise operations do not depend on the width; sums across a row always use 16 virtual
// lanes, held in 16 / TCXL_LANES native vectors. That is why every width gives the same bits.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define TCXL_INLINE inline __attribute__((always_inline))
#define TCXL_NOINLINE __attribute__((noinline))

namespace tcxl {
namespace {

constexpr int kLanes = TCXL_LANES;
constexpr int kGroup = 16;                      // floats of a group: the virtual lanes
constexpr int kGroupVectors = kGroup / kLanes;  // native vectors of a group
// Groups of a row that are summed in registers at once; wider rows are summed in blocks of columns.
constexpr int kGroupsMax = kLanes == 16 ? 8 : 4;
constexpr int kLine = 64;
#if defined(__x86_64__)
constexpr bool kHasStreaming = true;
#else
constexpr bool kHasStreaming = false;
#endif

typedef float Vec __attribute__((vector_size(4 * TCXL_LANES), may_alias));
typedef float UnalignedVec __attribute__((vector_size(4 * TCXL_LANES), aligned(4), may_alias));

typedef int32_t BitsVec __attribute__((vector_size(4 * TCXL_LANES)));

TCXL_INLINE Vec splat(float x) { return Vec{} + x; }
TCXL_INLINE Vec load_vec(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
TCXL_INLINE void store_vec(float* p, Vec v) { *reinterpret_cast<UnalignedVec*>(p) = v; }

TCXL_INLINE float square_root(float x) {
#if defined(__x86_64__)
  return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x)));
#else
  return __builtin_sqrtf(x);
#endif
}

TCXL_INLINE Vec square_root(Vec v) {
#if TCXL_LANES == 16
  return _mm512_maskz_sqrt_ps(0xffff, v);  // GCC 12 warns about the inside of _mm512_sqrt_ps
#elif TCXL_LANES == 8
  return _mm256_sqrt_ps(v);
#elif defined(__x86_64__)
  return _mm_sqrt_ps(v);
#elif defined(__aarch64__)
  return vsqrtq_f32(v);
#else
  for (int i = 0; i < kLanes; ++i) v[i] = __builtin_sqrtf(v[i]);
  return v;
#endif
}

// Non-temporal store of one native vector; p is aligned to its size.
TCXL_INLINE void stream_vec(float* p, Vec v) {
#if TCXL_LANES == 16
  _mm512_stream_ps(p, v);
#elif TCXL_LANES == 8
  _mm256_stream_ps(p, v);
#elif defined(__x86_64__)
  _mm_stream_ps(p, v);
#else
  store_vec(p, v);
#endif
}

// The last group of a row whose dim is no multiple of 16: lanes [0, count) exist, the others load
// as zero.
struct Tail {
#if TCXL_LANES == 16
  __mmask16 mask;
  TCXL_INLINE explicit Tail(int64_t columns)
      : mask(static_cast<__mmask16>((1u << (columns % kGroup)) - 1)) {}
  TCXL_INLINE Vec load(const float* p, int) const { return _mm512_maskz_loadu_ps(mask, p); }
  TCXL_INLINE void store(float* p, Vec v, int) const { _mm512_mask_storeu_ps(p, mask, v); }
#elif TCXL_LANES == 8
  __m256i mask[2];
  TCXL_INLINE explicit Tail(int64_t columns) {
    const __m256i count = _mm256_set1_epi32(static_cast<int>(columns % kGroup));
    mask[0] = _mm256_cmpgt_epi32(count, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    mask[1] = _mm256_cmpgt_epi32(count, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15));
  }
  TCXL_INLINE Vec load(const float* p, int at) const {
    return _mm256_maskload_ps(p, mask[at / kLanes]);
  }
  TCXL_INLINE void store(float* p, Vec v, int at) const {
    _mm256_maskstore_ps(p, mask[at / kLanes], v);
  }
#else
  int count;
  TCXL_INLINE explicit Tail(int64_t columns) : count(static_cast<int>(columns % kGroup)) {}
  TCXL_INLINE Vec load(const float* p, int at) const {
    if (count >= at + kLanes) return load_vec(p);
    Vec v{};
    for (int i = 0; i < count - at; ++i) v[i] = p[i];
    return v;
  }
  TCXL_INLINE void store(float* p, Vec v, int at) const {
    if (count >= at + kLanes) return store_vec(p, v);
    for (int i = 0; i < count - at; ++i) p[i] = v[i];
  }
#endif
};

// N native vectors; a recursive struct and not an array, so that compilers keep every one in a
// register. With kTail the last group is partial.
template <int N, bool kTail>
struct Row {
  Vec first;
  Row<N - 1, kTail> rest;
};
template <bool kTail>
struct Row<1, kTail> {
  Vec first;
};

template <int N, bool kTail>
constexpr bool in_tail = kTail && N <= kGroupVectors;
template <int N>
constexpr int tail_at =
    (kGroupVectors - N) * kLanes;  // first lane of the tail that vector N from the end holds

template <int N, bool kTail>
TCXL_INLINE void zero(Row<N, kTail>& row) {
  row.first = Vec{};
  if constexpr (N > 1) zero(row.rest);
}

template <int N, bool kTail>
TCXL_INLINE Vec load_one(const float* p, const Tail& tail) {
  if constexpr (in_tail<N, kTail>) return tail.load(p, tail_at<N>);
  return load_vec(p);
}

template <int N, bool kTail>
TCXL_INLINE void add(Row<N, kTail>& row, const float* p, const Tail& tail) {
  row.first += load_one<N, kTail>(p, tail);
  if constexpr (N > 1) add(row.rest, p + kLanes, tail);
}

template <int N, bool kTail>
TCXL_INLINE void add_scaled(Row<N, kTail>& row, const float* p, Vec factor, const Tail& tail) {
  row.first += factor * load_one<N, kTail>(p, tail);
  if constexpr (N > 1) add_scaled(row.rest, p + kLanes, factor, tail);
}

template <int N, bool kTail>
TCXL_INLINE void add_row(Row<N, kTail>& row, const Row<N, kTail>& other) {
  row.first += other.first;
  if constexpr (N > 1) add_row(row.rest, other.rest);
}

template <int N, bool kTail>
TCXL_INLINE void difference(Row<N, kTail>& row, const float* a, const float* b, const Tail& tail) {
  row.first = load_one<N, kTail>(a, tail) - load_one<N, kTail>(b, tail);
  if constexpr (N > 1) difference(row.rest, a + kLanes, b + kLanes, tail);
}

template <int N, bool kTail>
TCXL_INLINE void divide(Row<N, kTail>& row, Vec divisor) {
  row.first /= divisor;
  if constexpr (N > 1) divide(row.rest, divisor);
}

template <int N, bool kTail>
TCXL_INLINE void store_one(float* p, Vec v, const Tail& tail) {
  if constexpr (in_tail<N, kTail>) return tail.store(p, v, tail_at<N>);
  store_vec(p, v);
}

template <int N, bool kTail>
TCXL_INLINE void store(const Row<N, kTail>& row, float* p, const Tail& tail) {
  store_one<N, kTail>(p, row.first, tail);
  if constexpr (N > 1) store(row.rest, p + kLanes, tail);
}

// p += row, and p += factor * row.
template <int N, bool kTail>
TCXL_INLINE void add_to(float* p, const Row<N, kTail>& row, const Tail& tail) {
  store_one<N, kTail>(p, load_one<N, kTail>(p, tail) + row.first, tail);
  if constexpr (N > 1) add_to(p + kLanes, row.rest, tail);
}

template <int N, bool kTail>
TCXL_INLINE void add_scaled_to(float* p, const Row<N, kTail>& row, Vec factor, const Tail& tail) {
  store_one<N, kTail>(p, load_one<N, kTail>(p, tail) + factor * row.first, tail);
  if constexpr (N > 1) add_scaled_to(p + kLanes, row.rest, factor, tail);
}

// Stores whole vectors, the absent lanes of the tail as zeros: p has room for whole groups.
template <int N, bool kTail>
TCXL_INLINE void store_whole(const Row<N, kTail>& row, float* p) {
  store_vec(p, row.first);
  if constexpr (N > 1) store_whole(row.rest, p + kLanes);
}

// Zeros the row unless `keeps`, without a branch.
template <int N, bool kTail>
TCXL_INLINE void keep_if(Row<N, kTail>& row, bool keeps) {
  row.first =
      reinterpret_cast<Vec>(reinterpret_cast<BitsVec>(row.first) & (BitsVec{} - int32_t{keeps}));
  if constexpr (N > 1) keep_if(row.rest, keeps);
}

// Sixteen virtual lanes and their sum by the fixed tree: lane[i] += lane[i + 8], + 4, + 2, + 1.
using Lanes = Row<kGroupVectors, false>;

template <bool kTail, int N>
TCXL_INLINE void add_product(Row<N, false>& lanes, const float* a, const float* b,
                             const Tail& tail) {
  lanes.first += load_one<N, kTail>(a, tail) * load_one<N, kTail>(b, tail);
  if constexpr (N > 1) add_product<kTail>(lanes.rest, a + kLanes, b + kLanes, tail);
}

TCXL_INLINE float sum_lanes(const Lanes& lanes) {
#if TCXL_LANES == 16
  const Vec all = lanes.first;
  const auto eight = __builtin_shufflevector(all, all, 0, 1, 2, 3, 4, 5, 6, 7) +
                     __builtin_shufflevector(all, all, 8, 9, 10, 11, 12, 13, 14, 15);
#elif TCXL_LANES == 8
  const Vec eight = lanes.first + lanes.rest.first;
#endif
#if TCXL_LANES >= 8
  const auto four = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) +
                    __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
#else
  const Vec four =
      (lanes.first + lanes.rest.rest.first) + (lanes.rest.first + lanes.rest.rest.rest.first);
#endif
  return (four[0] + four[2]) + (four[1] + four[3]);
}

template <int G, bool kTailed>
struct Shape {
  static constexpr int groups = G;
  static constexpr bool tailed = kTailed;
  using RowType = Row<G * kGroupVectors, kTailed>;
};

template <int G, typename Op>
TCXL_INLINE void with_groups(int64_t columns, const Op& op) {
  if ((columns + kGroup - 1) / kGroup == G) {
    if (columns % kGroup == 0) {
      op(Shape<G, false>{});
    } else {
      op(Shape<G, true>{});
    }
  } else if constexpr (G < kGroupsMax) {
    with_groups<G + 1>(columns, op);
  }
}

// Calls op(Shape<groups, has a tail>) for a block of 1 .. kGroupsMax * 16 columns.
template <typename Op>
TCXL_INLINE void with_shape(int64_t columns, const Op& op) {
  with_groups<1>(columns, op);
}

// Prefetches for data that lies in the second-level cache or nearer.
TCXL_INLINE void prefetch_near(const void* p, int64_t bytes) {
  const char* c = static_cast<const char*>(p);
  for (int64_t k = 0; k < bytes; k += kLine) __builtin_prefetch(c + k, 0, 3);
}

// Prefetches rows of a table from memory, into the second level only: more misses can be under way
// at once there than the first level can wait for, which gave a fourth more rows a second than
// prefetch_near.
TCXL_INLINE void prefetch_far(const void* p, int64_t bytes) {
  const char* c = static_cast<const char*>(p);
  for (int64_t k = 0; k < bytes; k += kLine) __builtin_prefetch(c + k, 0, 2);
}

}  // namespace
}  // namespace tcxl
