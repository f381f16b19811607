// Checksums of rows as they are logged. Part of kernels_body.h.
#pragma once

#include "crc32c.h"
#include "kernels_internal.h"
#include "kernels_vec.h"

namespace tcxl {
namespace {

constexpr uint64_t kGroupRows = 4;  // records whose checksums are computed side by side

struct RecordSource {
  uint64_t row;
  const float* state;
  const float* weight;
};

TCXL_INLINE uint64_t load_word(const float* p) {
  uint64_t word;
  std::memcpy(&word, p, sizeof(word));
  return word;
}

TCXL_INLINE uint32_t load_half_word(const float* p) {
  uint32_t word;
  std::memcpy(&word, p, sizeof(word));
  return word;
}

#if defined(__SSE4_2__)
// The crc32 instruction takes three cycles but one can start every cycle: four records hide the
// latency.
struct CrcGroup {
  uint64_t state[kGroupRows];
  TCXL_INLINE void words(const float* const (&p)[kGroupRows], int64_t floats) {
    int64_t k = 0;
    for (; k + 2 <= floats; k += 2) {
      for (uint64_t i = 0; i < kGroupRows; ++i) {
        state[i] = _mm_crc32_u64(state[i], load_word(p[i] + k));
      }
    }
    if (k == floats) return;
    for (uint64_t i = 0; i < kGroupRows; ++i) {
      state[i] = _mm_crc32_u32(static_cast<uint32_t>(state[i]), load_half_word(p[i] + k));
    }
  }
};

#if TCXL_LANES == 16
#define TCXL_FOLD __attribute__((target("vpclmulqdq")))

// x * (a power of the polynomial's variable) for each 128-bit lane, + next. The low half of a lane
// is the earlier one; a lane of `powers` holds those of its distance D in bits: x^(D + 32), low,
// and x^(D - 32), high, both modulo the polynomial, bits reversed and shifted left by one.
TCXL_FOLD TCXL_INLINE __m512i fold(__m512i x, __m512i powers, __m512i next) {
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(x, powers, 0x00),
                                   _mm512_clmulepi64_epi128(x, powers, 0x11), next, 0x96);
}

// CrcGroup::words of whole 64-byte vectors by carry-less multiplication, 64 bytes at a time instead
// of 8: a vector stands for its bits as a polynomial, and what is congruent to the bytes so far is
// carried along (Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ").
TCXL_FOLD TCXL_NOINLINE void fold_words(CrcGroup& group, const float* const (&p)[kGroupRows],
                                        int64_t floats) {
  const __m512i by_vector = _mm512_set4_epi64(0x9e4addf8, 0x740eef02, 0x9e4addf8, 0x740eef02);
  // Distances 384, 256 and 128 to the last lane, which is added as it is.
  const __m512i by_lane = _mm512_set_epi64(0, 0, 0x14cd00bd6, 0xf20c0dfe, 0xba4fc28e, 0x1384aa63a,
                                           0x1d82c63da, 0x1c291d04);
  __m512i sum[kGroupRows];
  for (uint64_t i = 0; i < kGroupRows; ++i) {
    const __m128i state = _mm_cvtsi32_si128(static_cast<int>(group.state[i]));
    sum[i] = _mm512_xor_si512(_mm512_loadu_si512(p[i]), _mm512_zextsi128_si512(state));
  }
  for (int64_t k = kLanes; k < floats; k += kLanes) {
    for (uint64_t i = 0; i < kGroupRows; ++i) {
      sum[i] = fold(sum[i], by_vector, _mm512_loadu_si512(p[i] + k));
    }
  }
  for (uint64_t i = 0; i < kGroupRows; ++i) {
    const __m512i lanes = fold(sum[i], by_lane, _mm512_maskz_mov_epi64(0xc0, sum[i]));
    const __m256i two = _mm256_xor_si256(_mm512_maskz_extracti64x4_epi64(0xf, lanes, 0),
                                         _mm512_maskz_extracti64x4_epi64(0xf, lanes, 1));
    const __m128i one =
        _mm_xor_si128(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1));
    const uint64_t low = _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(one)));
    group.state[i] = _mm_crc32_u64(low, static_cast<uint64_t>(_mm_extract_epi64(one, 1)));
  }
}

TCXL_INLINE void add_words(CrcGroup& group, const float* const (&p)[kGroupRows], int64_t floats) {
  constexpr int64_t kWorthFolding = 2 * kLanes;
  if (floats >= kWorthFolding && floats % kLanes == 0 && internal::can_fold_crc) {
    fold_words(group, p, floats);
  } else {
    group.words(p, floats);
  }
}
#else
TCXL_INLINE void add_words(CrcGroup& group, const float* const (&p)[kGroupRows], int64_t floats) {
  group.words(p, floats);
}
#endif

TCXL_INLINE void record_crcs(uint32_t start, const RecordSource (&source)[kGroupRows],
                             int64_t state_floats, int64_t dim, uint32_t (&crc)[kGroupRows]) {
  CrcGroup group;
  for (uint64_t i = 0; i < kGroupRows; ++i) {
    group.state[i] = _mm_crc32_u64(static_cast<uint32_t>(~start), source[i].row);
  }
  add_words(group, {source[0].state, source[1].state, source[2].state, source[3].state},
            state_floats);
  add_words(group, {source[0].weight, source[1].weight, source[2].weight, source[3].weight}, dim);
  for (uint64_t i = 0; i < kGroupRows; ++i) crc[i] = ~static_cast<uint32_t>(group.state[i]);
}
#else
TCXL_INLINE void record_crcs(uint32_t start, const RecordSource (&source)[kGroupRows],
                             int64_t state_floats, int64_t dim, uint32_t (&crc)[kGroupRows]) {
  for (uint64_t i = 0; i < kGroupRows; ++i) {
    const uint32_t row = crc32c(start, &source[i].row, sizeof(uint64_t));
    const uint32_t state = crc32c(row, source[i].state, static_cast<size_t>(state_floats) * 4);
    crc[i] = crc32c(state, source[i].weight, static_cast<size_t>(dim) * 4);
  }
}
#endif

}  // namespace
}  // namespace tcxl
