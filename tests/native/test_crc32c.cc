// CRC-32C: known answers, and the instruction against the table for every length and alignment.
#include <cstdint>
#include <string>
#include <vector>

#include "check.h"
#include "crc32c.h"

namespace {

using tcxl::crc32c;
using tcxl::crc32c_table;

uint32_t bit_by_bit(uint32_t crc, const std::vector<uint8_t>& data, size_t begin, size_t end) {
  uint32_t state = ~crc;
  for (size_t i = begin; i < end; ++i) {
    state ^= data[i];
    for (int bit = 0; bit < 8; ++bit)
      state = (state & 1) != 0 ? state >> 1 ^ 0x82f63b78u : state >> 1;
  }
  return ~state;
}

std::vector<uint8_t> random_bytes(size_t size) {
  std::vector<uint8_t> bytes(size);
  uint64_t x = 88172645463325252u;
  for (uint8_t& byte : bytes) {
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    byte = static_cast<uint8_t>(x >> 32);
  }
  return bytes;
}

// RFC 3720, appendix B.4, and the check value of the algorithm.
void known_answers() {
  CHECK_EQUAL(crc32c(0, "123456789", 9), 0xe3069283u);
  CHECK_EQUAL(crc32c_table(0, "123456789", 9), 0xe3069283u);
  std::vector<uint8_t> bytes(32, 0);
  CHECK_EQUAL(crc32c(0, bytes.data(), 32), 0x8a9136aau);
  bytes.assign(32, 0xff);
  CHECK_EQUAL(crc32c(0, bytes.data(), 32), 0x62a8ab43u);
  for (uint8_t i = 0; i < 32; ++i) bytes[i] = i;
  CHECK_EQUAL(crc32c(0, bytes.data(), 32), 0x46dd794eu);
  CHECK_EQUAL(crc32c(0x12345678u, bytes.data(), 0), 0x12345678u);
}

void every_length_and_alignment() {
  const std::vector<uint8_t> bytes = random_bytes(40000);
  for (size_t begin = 0; begin < 9; ++begin) {
    for (size_t size = 0; size < 1100; ++size) {
      const uint32_t expected = bit_by_bit(7, bytes, begin, begin + size);
      if (!CHECK_EQUAL(crc32c(7, &bytes[begin], size), expected)) return;
      if (!CHECK_EQUAL(crc32c_table(7, &bytes[begin], size), expected)) return;
    }
  }
  // Around the block lengths of the interleaved form.
  for (const size_t size :
       {12280u, 12287u, 12288u, 12289u, 13056u, 13061u, 24576u, 25344u, 39990u}) {
    const uint32_t expected = bit_by_bit(0, bytes, 3, 3 + size);
    CHECK_EQUAL(crc32c(0, &bytes[3], size), expected);
    CHECK_EQUAL(crc32c_table(0, &bytes[3], size), expected);
  }
}

void continues_over_any_split() {
  const std::vector<uint8_t> bytes = random_bytes(2000);
  const uint32_t whole = crc32c(0, bytes.data(), bytes.size());
  for (size_t split = 0; split <= bytes.size(); split += 13) {
    const uint32_t head = crc32c(0, bytes.data(), split);
    if (!CHECK_EQUAL(crc32c(head, bytes.data() + split, bytes.size() - split), whole)) return;
  }
}

void sees_every_flipped_bit() {
  std::vector<uint8_t> bytes = random_bytes(136);
  const uint32_t whole = crc32c(0, bytes.data(), bytes.size());
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes[bit / 8] = static_cast<uint8_t>(bytes[bit / 8] ^ (1u << (bit % 8)));
    CHECK(crc32c(0, bytes.data(), bytes.size()) != whole);
    bytes[bit / 8] = static_cast<uint8_t>(bytes[bit / 8] ^ (1u << (bit % 8)));
  }
}

}  // namespace

int main() {
  known_answers();
  every_length_and_alignment();
  continues_over_any_split();
  sees_every_flipped_bit();
  return tcxl::test::check_result();
}
