// What the memory gives to plain loops: sequential read, random gather of rows, and copies that are
// forced to the medium. Compiled by benchmarks/native_loops.py and called through ctypes.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

// 16 floats at any 4-byte boundary; the compiler makes of it what the CPU has.
typedef float Vec __attribute__((vector_size(64), aligned(4)));

float total(const Vec& v) {
  float sum = 0;
  for (int k = 0; k < 16; ++k) sum += v[k];
  return sum;
}

}  // namespace

extern "C" {

// Reads `count` floats in order; the sum keeps the loads.
float read_in_order(const float* from, int64_t count) {
  Vec s0{}, s1{}, s2{}, s3{};
  for (int64_t i = 0; i + 64 <= count; i += 64) {
    s0 += *reinterpret_cast<const Vec*>(from + i);
    s1 += *reinterpret_cast<const Vec*>(from + i + 16);
    s2 += *reinterpret_cast<const Vec*>(from + i + 32);
    s3 += *reinterpret_cast<const Vec*>(from + i + 48);
  }
  return total(s0 + s1 + s2 + s3);
}

// Reads whole rows (a multiple of 16 floats) by number, prefetching `distance` rows ahead.
float gather(const float* table, int64_t dim, const int64_t* rows, int64_t count,
             int64_t distance) {
  Vec sum{};
  for (int64_t i = 0; i < count; ++i) {
    if (distance > 0 && i + distance < count) {
      const float* next = table + rows[i + distance] * dim;
      for (int64_t k = 0; k < dim; k += 16) __builtin_prefetch(next + k);
    }
    const float* row = table + rows[i] * dim;
    for (int64_t k = 0; k < dim; k += 16) sum += *reinterpret_cast<const Vec*>(row + k);
  }
  return total(sum);
}

// Appends rows to a redo log, each with its number, past the caches (or through them), and waits
// until they are out. Returns the bytes written.
int64_t log_rows(const float* table, int64_t dim, const int64_t* rows, int64_t count, char* log) {
  char* to = log;
  for (int64_t i = 0; i < count; ++i) {
    _mm_stream_si64(reinterpret_cast<long long*>(to), rows[i]);
    to += 8;
    const float* row = table + rows[i] * dim;
    for (int64_t k = 0; k < dim; k += 2, to += 8) {
      long long pair;
      std::memcpy(&pair, row + k, 8);
      _mm_stream_si64(reinterpret_cast<long long*>(to), pair);
    }
  }
  _mm_sfence();
  return to - log;
}

// The same for bytes as they lie, a multiple of 8.
void log_bytes(const char* from, int64_t bytes, char* log) {
  for (int64_t i = 0; i + 8 <= bytes; i += 8) {
    long long word;
    std::memcpy(&word, from + i, 8);
    _mm_stream_si64(reinterpret_cast<long long*>(log + i), word);
  }
  _mm_sfence();
}
}
