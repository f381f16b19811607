// CRC-32C by the instruction of SSE4.2.
#include <cstring>

#include "kernels_internal.h"

#if defined(__x86_64__)
#include <nmmintrin.h>

namespace tcxl::internal {
namespace {

// Three streams hide the three cycles of the instruction; their checksums are joined by advancing
// the earlier ones over as many zero bytes as follow them.
constexpr size_t kLong = 4096;
constexpr size_t kShort = 256;

uint64_t load64(const unsigned char* p) {
  uint64_t word;
  std::memcpy(&word, p, sizeof(word));
  return word;
}

// The linear map "append kBytes zero bytes" on checksum states, as four tables of one byte each.
template <size_t kBytes>
struct ZeroBytes {
  uint32_t table[4][256];
  constexpr ZeroBytes() : table() {
    uint32_t column[32] = {};  // image of each bit
    for (int bit = 0; bit < 32; ++bit) column[bit] = one_bit(uint32_t{1} << bit);
    for (size_t doubled = 1; doubled < kBytes * 8; doubled *= 2) {
      uint32_t squared[32] = {};
      for (int bit = 0; bit < 32; ++bit) squared[bit] = apply(column, column[bit]);
      for (int bit = 0; bit < 32; ++bit) column[bit] = squared[bit];
    }
    for (int byte = 0; byte < 4; ++byte) {
      for (uint32_t value = 0; value < 256; ++value)
        table[byte][value] = apply(column, value << (8 * byte));
    }
  }
  static constexpr uint32_t one_bit(uint32_t state) {
    return state >> 1 ^ (state & 1 ? 0x82f63b78u : 0);
  }
  static constexpr uint32_t apply(const uint32_t (&column)[32], uint32_t state) {
    uint32_t image = 0;
    for (int bit = 0; bit < 32; ++bit) image ^= (state >> bit & 1) != 0 ? column[bit] : 0;
    return image;
  }
  uint32_t operator()(uint32_t state) const {
    return table[0][state & 255] ^ table[1][state >> 8 & 255] ^ table[2][state >> 16 & 255] ^
           table[3][state >> 24];
  }
};

constexpr ZeroBytes<kLong> kLongShift;
constexpr ZeroBytes<kShort> kShortShift;

template <size_t kBytes>
void three_streams(uint64_t& crc, const unsigned char*& p, size_t& size,
                   const ZeroBytes<kBytes>& shift) {
  static_assert((kBytes & (kBytes - 1)) == 0 && kBytes % 8 == 0);
  for (; size >= 3 * kBytes; size -= 3 * kBytes, p += 3 * kBytes) {
    uint64_t a = crc, b = 0, c = 0;
    for (size_t k = 0; k < kBytes; k += 8) {
      a = _mm_crc32_u64(a, load64(p + k));
      b = _mm_crc32_u64(b, load64(p + kBytes + k));
      c = _mm_crc32_u64(c, load64(p + 2 * kBytes + k));
    }
    const uint32_t ab = shift(static_cast<uint32_t>(a)) ^ static_cast<uint32_t>(b);
    crc = shift(ab) ^ static_cast<uint32_t>(c);
  }
}

}  // namespace

bool has_crc32_instruction() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("sse4.2") != 0;
}

namespace {

bool has_vector_carryless_multiply() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("vpclmulqdq") != 0;
}

}  // namespace

const bool can_fold_crc = has_vector_carryless_multiply();

uint32_t crc32c_sse42(uint32_t crc, const void* data, size_t size) {
  const auto* p = static_cast<const unsigned char*>(data);
  uint64_t state = ~crc;
  three_streams(state, p, size, kLongShift);
  three_streams(state, p, size, kShortShift);
  for (; size >= 8; size -= 8, p += 8) state = _mm_crc32_u64(state, load64(p));
  if (size >= 4) {
    uint32_t word;
    std::memcpy(&word, p, sizeof(word));
    state = _mm_crc32_u32(static_cast<uint32_t>(state), word);
    size -= 4;
    p += 4;
  }
  for (; size > 0; --size, ++p) state = _mm_crc32_u8(static_cast<uint32_t>(state), *p);
  return ~static_cast<uint32_t>(state);
}

}  // namespace tcxl::internal

#else

namespace tcxl::internal {

bool has_crc32_instruction() { return false; }
uint32_t crc32c_sse42(uint32_t crc, const void*, size_t) { return crc; }
const bool can_fold_crc = false;

}  // namespace tcxl::internal

#endif
