// What the memory gives to plain loops: sequential read, random gather of rows, changes of sorted
// rows, and copies that are forced to the medium. Compiled by benchmarks/native_loops.py and called
// through ctypes.
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

// Floats that one store past the caches takes.
#if defined(__AVX512F__)
constexpr int64_t kStream = 16;
void stream(float* to, const float* from) { _mm512_stream_ps(to, _mm512_loadu_ps(from)); }
#else
constexpr int64_t kStream = 4;
void stream(float* to, const float* from) { _mm_stream_ps(to, _mm_loadu_ps(from)); }
#endif

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

// Stores `count` floats in order.
void write_in_order(float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(i & 1);
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

// Sorts row numbers below 2^22, each with its place, and drops the second of two equal ones: two
// passes of a radix sort, nothing else. `keys` and `spare` have room for `count` words. Returns how
// many rows are left in `keys`.
int64_t sort_rows(const int64_t* rows, int64_t count, uint64_t* keys, uint64_t* spare) {
  constexpr int kBits = 11;
  constexpr uint64_t kMask = (1u << kBits) - 1;
  static thread_local uint32_t next[2][1 << kBits];
  std::memset(next, 0, sizeof(next));
  for (int64_t i = 0; i < count; ++i) {
    const auto row = static_cast<uint64_t>(rows[i]);
    keys[i] = row << 32 | static_cast<uint64_t>(i);
    ++next[0][row & kMask];
    ++next[1][row >> kBits];
  }
  uint32_t sums[2] = {};
  for (uint64_t k = 0; k <= kMask; ++k) {
    for (int pass = 0; pass < 2; ++pass) {
      const uint32_t here = next[pass][k];
      next[pass][k] = sums[pass];
      sums[pass] += here;
    }
  }
  for (int64_t i = 0; i < count; ++i) spare[next[0][keys[i] >> 32 & kMask]++] = keys[i];
  for (int64_t i = 0; i < count; ++i) keys[next[1][spare[i] >> (32 + kBits)]++] = spare[i];
  int64_t kept = 0;
  uint64_t before = ~uint64_t{0};
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t row = keys[i] >> 32;
    keys[kept] = row;
    kept += row != before;
    before = row;
  }
  return kept;
}

// Reads, copies to a log past the caches (if there is one) and stores rows, whose numbers ascend.
void change_rows(float* table, int64_t dim, const uint64_t* rows, int64_t count, float* log) {
  constexpr int64_t kAhead = 24;
  const auto stride = static_cast<uint64_t>(dim);
  for (int64_t i = 0; i < count; ++i) {
    const float* next = table + rows[i + kAhead < count ? i + kAhead : count - 1] * stride;
    for (int64_t k = 0; k < dim; k += 16) __builtin_prefetch(next + k, 0, 2);
    float* row = table + rows[i] * stride;
    for (int64_t k = 0; k < dim; k += 16) {
      Vec& part = *reinterpret_cast<Vec*>(row + k);
      if (log != nullptr) {
        for (int64_t j = 0; j < 16; j += kStream) stream(log + i * dim + k + j, row + k + j);
      }
      part -= part * 0x1p-60f;  // the same bits
    }
  }
  _mm_sfence();
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
