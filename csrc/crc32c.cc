#include "crc32c.h"

#include <bit>
#include <cstring>

#include "kernels_internal.h"

namespace tcxl {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78u;  // 0x1edc6f41, bits reversed

// table[k][byte]: the checksum state after `byte` and then k zero bytes. Eight bytes a step.
struct Slices {
  uint32_t table[8][256];
  constexpr Slices() : table() {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t state = byte;
      for (int bit = 0; bit < 8; ++bit) state = state >> 1 ^ ((state & 1) != 0 ? kPolynomial : 0);
      table[0][byte] = state;
    }
    for (int k = 1; k < 8; ++k) {
      for (int byte = 0; byte < 256; ++byte) {
        table[k][byte] = table[k - 1][byte] >> 8 ^ table[0][table[k - 1][byte] & 255];
      }
    }
  }
};

constexpr Slices kSlices;

// Not a function pointer: before this is initialised (a static constructor elsewhere) the table
// serves.
const bool kHasInstruction = internal::has_crc32_instruction();

}  // namespace

uint32_t crc32c_table(uint32_t crc, const void* data, size_t size) {
  static_assert(std::endian::native == std::endian::little);
  const auto& t = kSlices.table;
  const auto* p = static_cast<const unsigned char*>(data);
  uint32_t state = ~crc;
  for (; size >= 8; size -= 8, p += 8) {
    uint32_t low, high;
    std::memcpy(&low, p, 4);
    std::memcpy(&high, p + 4, 4);
    low ^= state;
    state = t[7][low & 255] ^ t[6][low >> 8 & 255] ^ t[5][low >> 16 & 255] ^ t[4][low >> 24] ^
            t[3][high & 255] ^ t[2][high >> 8 & 255] ^ t[1][high >> 16 & 255] ^ t[0][high >> 24];
  }
  for (; size > 0; --size, ++p) state = state >> 8 ^ t[0][(state ^ *p) & 255];
  return ~state;
}

uint32_t crc32c(uint32_t crc, const void* data, size_t size) {
  return kHasInstruction ? internal::crc32c_sse42(crc, data, size) : crc32c_table(crc, data, size);
}

}  // namespace tcxl
