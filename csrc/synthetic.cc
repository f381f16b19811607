#include "synthetic.h"

#include <algorithm>
#include <bit>
#include <cmath>

// The arithmetic is written once and compiled for each vector width, so it has to be inlined into
// functions with different target attributes.
#if defined(__GNUC__)
#define TCXL_INLINE inline __attribute__((always_inline))
#else
#define TCXL_INLINE inline
#endif

namespace tcxl {
namespace {

constexpr int kBlock = 256;  // samples computed together: loops long enough to vectorize, in L1
constexpr std::uint64_t kStreamFactor = 0x9E3779B97F4A7C15u;
constexpr std::uint64_t kFieldFactor = 0xD1B54A32D192ED03u;

enum Stream : std::uint64_t {
  kDenseMissing = 1,
  kDense = 2,   // and 3
  kEffect = 6,  // and 7
  kFactor = 8,  // and 9
  kLabel = 10,
  kBlockSet = 13,
  kLookup = 0x1000,
  kLocal = 0x2000,
  kLocalSlot = 0x3000,
};

constexpr double kTwo52 = 4503599627370496.0;
constexpr double kRound = 6755399441055744.0;
constexpr std::uint64_t kTwo52Bits = 0x4330000000000000u;
constexpr std::uint64_t kMantissa = 0x000FFFFFFFFFFFFFu;
constexpr double kLn2Hi = 0x1.62e42fee00000p-1;
constexpr double kLn2Lo = 0x1.a39ef35793c76p-33;
constexpr double kLog2E = 0x1.71547652b82fep+0;
constexpr double kHalfPi = 0x1.921fb54442d18p+0;

constexpr double kLogTerms[] = {0x1.642c8590b2164p-4, 0x1.8618618618618p-4, 0x1.af286bca1af28p-4,
                                0x1.e1e1e1e1e1e1ep-4, 0x1.1111111111111p-3, 0x1.3b13b13b13b14p-3,
                                0x1.745d1745d1746p-3, 0x1.c71c71c71c71cp-3, 0x1.2492492492492p-2,
                                0x1.999999999999ap-2, 0x1.5555555555555p-1};
constexpr double kExpTerms[] = {0x1.6124613a86d09p-33, 0x1.1eed8eff8d898p-29, 0x1.ae64567f544e4p-26,
                                0x1.27e4fb7789f5cp-22, 0x1.71de3a556c734p-19, 0x1.a01a01a01a01ap-16,
                                0x1.a01a01a01a01ap-13, 0x1.6c16c16c16c17p-10, 0x1.1111111111111p-7,
                                0x1.5555555555555p-5,  0x1.5555555555555p-3,  0x1.0000000000000p-1};
constexpr double kSinTerms[] = {
    0x1.952c77030ad4ap-49, -0x1.ae7f3e733b81fp-41, 0x1.6124613a86d09p-33, -0x1.ae64567f544e4p-26,
    0x1.71de3a556c734p-19, -0x1.a01a01a01a01ap-13, 0x1.1111111111111p-7,  -0x1.5555555555555p-3};
constexpr double kCosTerms[] = {
    0x1.ae7f3e733b81fp-45, -0x1.93974a8c07c9dp-37, 0x1.1eed8eff8d898p-29, -0x1.27e4fb7789f5cp-22,
    0x1.a01a01a01a01ap-16, -0x1.6c16c16c16c17p-10, 0x1.5555555555555p-5,  -0x1.0000000000000p-1};

TCXL_INLINE std::uint64_t mix(std::uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
  return value ^ (value >> 31);
}

std::uint64_t prefix(std::uint64_t seed, std::uint64_t stream, std::uint64_t field) {
  return mix(mix(seed ^ (stream * kStreamFactor)) ^ (field * kFieldFactor));
}

// Exact conversions by bit patterns: the plain casts do not vectorize before AVX-512.
TCXL_INLINE double from_bits53(std::uint64_t value) {
  const double low = std::bit_cast<double>((value & 0xFFFFFFFFu) | kTwo52Bits) - kTwo52;
  const double high = std::bit_cast<double>((value >> 32) | kTwo52Bits) - kTwo52;
  return high * 4294967296.0 + low;
}

TCXL_INLINE std::uint64_t to_integer(double whole) {  // whole number in [0, 2^52)
  return std::bit_cast<std::uint64_t>(whole + kTwo52) & kMantissa;
}

TCXL_INLINE double unit(std::uint64_t bits) { return (from_bits53(bits >> 11) + 0.5) * 0x1p-53; }

template <int N>
TCXL_INLINE double horner(double x, const double (&terms)[N]) {
  double total = terms[0];
  for (int i = 1; i < N; ++i) total = total * x + terms[i];
  return total;
}

TCXL_INLINE double round_down(double x) {
  const double nearest = (x + kTwo52) - kTwo52;
  return nearest > x ? nearest - 1.0 : nearest;
}

TCXL_INLINE double natural_log(double x) {
  const auto bits = std::bit_cast<std::uint64_t>(x);
  const std::uint64_t fraction = bits & kMantissa;
  const std::uint64_t above = (fraction | 0x3FF0000000000000u) >= 0x3FF6A09E667F3BCDu ? 1u : 0u;
  // Biased exponent as an exact double, then the bias taken off.
  const double exponent =
      (std::bit_cast<double>(((bits >> 52) + above) | kTwo52Bits) - kTwo52) - 1023.0;
  const double mantissa = std::bit_cast<double>(fraction | (0x3FF0000000000000u - (above << 52)));
  const double s = (mantissa - 1.0) / (mantissa + 1.0);
  const double square = s * s;
  const double tail = s * (square * horner(square, kLogTerms)) + exponent * kLn2Lo;
  return exponent * kLn2Hi + ((s + s) + tail);
}

TCXL_INLINE double exponential(double x) {
  x = x < -700.0 ? -700.0 : x;
  x = x > 700.0 ? 700.0 : x;
  const double power = (x * kLog2E + kRound) - kRound;
  const double rest = (x - power * kLn2Hi) - power * kLn2Lo;
  const double series = (horner(rest, kExpTerms) * rest) * rest + rest + 1.0;
  return series * std::bit_cast<double>(to_integer(power + 1023.0) << 52);
}

struct SinCos {
  double sine;
  double cosine;
};

TCXL_INLINE SinCos sincos_turn(double u) {
  const double quarter = u * 4.0;
  const double nearest = (quarter + kRound) - kRound;
  const double angle = (quarter - nearest) * kHalfPi;
  const double square = angle * angle;
  const double sine = (horner(square, kSinTerms) * square) * angle + angle;
  const double cosine = horner(square, kCosTerms) * square + 1.0;
  const std::uint64_t quadrant = to_integer(nearest) & 3u;
  const bool swap = (quadrant & 1u) != 0;
  const double first = swap ? cosine : sine;
  const double second = swap ? sine : cosine;
  return {quadrant >= 2u ? -first : first, quadrant == 1u || quadrant == 2u ? -second : second};
}

TCXL_INLINE void uniforms(std::uint64_t start, const std::uint64_t* counter, int count,
                          double* out) {
  for (int i = 0; i < count; ++i) out[i] = unit(mix(start ^ counter[i]));
}

// Box-Muller of `stream` and `stream` + 1: two independent normals.
TCXL_INLINE void normals(std::uint64_t seed, std::uint64_t stream, std::uint64_t field,
                         const std::uint64_t* counter, int count, double* first, double* second) {
  const std::uint64_t radius_start = prefix(seed, stream, field);
  const std::uint64_t angle_start = prefix(seed, stream + 1, field);
  for (int i = 0; i < count; ++i) {
    const double radius = std::sqrt(natural_log(unit(mix(radius_start ^ counter[i]))) * -2.0);
    const SinCos angle = sincos_turn(unit(mix(angle_start ^ counter[i])));
    first[i] = radius * angle.cosine;
    second[i] = radius * angle.sine;
  }
}

struct Workspace {
  std::uint64_t counter[kBlock];
  std::uint64_t place[kBlock];
  std::uint64_t rank[kBlock];
  double a[kBlock];
  double b[kBlock];
  double dense_sum[kBlock];
  double effect_sum[kBlock];
};

// Factors of the fields that take part in pairs, kept until all fields are done.
using Factors = std::vector<double>;  // fields x 2 x kBlock

TCXL_INLINE void dense_block(const SyntheticSpec& spec, int count, Workspace& w, float* dense) {
  const auto stride = static_cast<std::ptrdiff_t>(spec.dense.size());
  for (int i = 0; i < count; ++i) w.dense_sum[i] = 0.0;
  for (std::size_t k = 0; k < spec.dense.size(); ++k) {
    const SyntheticDense field = spec.dense[k];
    normals(spec.seed, kDense, k, w.counter, count, w.a, w.b);
    uniforms(prefix(spec.seed, kDenseMissing, k), w.counter, count, w.b);
    for (int i = 0; i < count; ++i) {
      const double value =
          round_down(exponential(field.mean + field.deviation * w.a[i])) + field.shift;
      const double logarithm = natural_log(1.0 + (value > 0.0 ? value : 0.0));
      const bool missing = w.b[i] < field.missing;
      const double term = field.weight * (logarithm - field.mean);
      w.dense_sum[i] = w.dense_sum[i] + (missing ? 0.0 : term);
      w.a[i] = missing ? 0.0 : logarithm;
    }
    float* column = dense + k;
    for (int i = 0; i < count; ++i) column[i * stride] = static_cast<float>(w.a[i]);
  }
}

// Leaves in w.a the uniform that decides the rank of lookup `h`.
TCXL_INLINE void rank_uniforms(const SyntheticSpec& spec, std::uint64_t field, std::uint64_t h,
                               int count, Workspace& w) {
  uniforms(prefix(spec.seed, kLookup + h, field), w.counter, count, w.a);
  if (spec.rho == 0.0) return;
  const auto ids = static_cast<double>(spec.block_ids);
  uniforms(prefix(spec.seed, kLocalSlot + h, field), w.counter, count, w.b);
  for (int i = 0; i < count; ++i) {
    const double slot = w.b[i] * ids;
    const double last = ids - 1.0;
    w.place[i] = (w.counter[i] / spec.block_samples) * spec.block_ids +
                 to_integer(round_down(slot < last ? slot : last));
  }
  const std::uint64_t set_start = prefix(spec.seed, kBlockSet, field);
  uniforms(prefix(spec.seed, kLocal + h, field), w.counter, count, w.b);
  for (int i = 0; i < count; ++i) {
    const double shared = unit(mix(set_start ^ w.place[i]));
    w.a[i] = w.b[i] <= spec.rho ? shared : w.a[i];
  }
}

TCXL_INLINE void ranks(const SyntheticField& field, int count, Workspace& w) {
  const double last = static_cast<double>(field.cardinality) - 1.0;
  const double span = field.span;
  const double inverse = field.inverse;
  if (inverse != 0.0) {
    for (int i = 0; i < count; ++i) w.a[i] = natural_log(1.0 + w.a[i] * span) * inverse;
  } else {
    for (int i = 0; i < count; ++i) w.a[i] = w.a[i] * span;
  }
  for (int i = 0; i < count; ++i) {
    double rank = exponential(w.a[i]) - 1.0;
    rank = rank < last ? rank : last;
    w.rank[i] = to_integer(round_down(rank > 0.0 ? rank : 0.0));
  }
}

// w.place = (w.rank * multiplier + offset) mod rows.
TCXL_INLINE void spread(const SyntheticField& field, int count, Workspace& w) {
  const auto rows = static_cast<std::uint64_t>(field.cardinality);
  const auto multiplier = static_cast<std::uint64_t>(field.multiplier);
  const auto offset = static_cast<std::uint64_t>(field.offset);
  if (rows >= (1u << 26)) {
    for (int i = 0; i < count; ++i) w.place[i] = (w.rank[i] * multiplier + offset) % rows;
    return;
  }
  // Values below 2^53: quotient by a reciprocal, at most one off, so that the loop vectorizes.
  const double reciprocal = 1.0 / static_cast<double>(rows);
  for (int i = 0; i < count; ++i) {
    const std::uint64_t value = w.rank[i] * multiplier + offset;
    const std::uint64_t quotient = to_integer(round_down(from_bits53(value) * reciprocal));
    std::uint64_t rest = value - quotient * rows;
    rest = rest >> 63 ? rest + rows : rest;
    w.place[i] = rest >= rows ? rest - rows : rest;
  }
}

TCXL_INLINE void field_block(const SyntheticSpec& spec, std::size_t j, int count, Workspace& w,
                             double* factors, std::int64_t* ids, std::ptrdiff_t stride) {
  const SyntheticField field = spec.fields[j];
  // Last lookup first: the ranks of lookup 0 are left in w.rank for the teacher.
  for (std::int64_t h = field.hotness - 1; h >= 0; --h) {
    rank_uniforms(spec, j, static_cast<std::uint64_t>(h), count, w);
    ranks(field, count, w);
    spread(field, count, w);
    for (int i = 0; i < count; ++i) ids[i * stride + h] = static_cast<std::int64_t>(w.place[i]);
  }
  normals(spec.seed, kEffect, j, w.rank, count, w.a, w.b);
  for (int i = 0; i < count; ++i) w.effect_sum[i] = w.effect_sum[i] + w.a[i];
  if (factors != nullptr) {
    normals(spec.seed, kFactor, j, w.rank, count, factors, factors + kBlock);
  }
}

TCXL_INLINE void finish_block(const SyntheticSpec& spec, int count, Workspace& w,
                              const Factors& factors, float* label, double* score) {
  for (int i = 0; i < count; ++i) w.b[i] = 0.0;
  for (const SyntheticPair& pair : spec.pairs) {
    const double* a = factors.data() + pair.a * 2 * kBlock;
    const double* b = factors.data() + pair.b * 2 * kBlock;
    for (int i = 0; i < count; ++i) {
      w.b[i] = w.b[i] + (a[i] * b[i] + a[kBlock + i] * b[kBlock + i]);
    }
  }
  const double root = std::sqrt(13.0);
  uniforms(prefix(spec.seed, kLabel, 0), w.counter, count, w.a);
  for (int i = 0; i < count; ++i) {
    double z = (spec.bias + w.dense_sum[i] / root) + 0.3 * w.effect_sum[i];
    z = z + 0.25 * w.b[i];
    score[i] = z;
    label[i] = w.a[i] < 1.0 / (1.0 + exponential(-z)) ? 1.0F : 0.0F;
  }
}

TCXL_INLINE void all_blocks(const SyntheticSpec& spec, const std::int64_t* samples,
                            std::int64_t total, const SyntheticOutput& out) {
  const std::ptrdiff_t lookups = synthetic_lookups(spec);
  const auto num_dense = static_cast<std::ptrdiff_t>(spec.dense.size());
  std::vector<bool> in_pair(spec.fields.size(), false);
  for (const SyntheticPair& pair : spec.pairs) {
    in_pair[static_cast<std::size_t>(pair.a)] = in_pair[static_cast<std::size_t>(pair.b)] = true;
  }
  Factors factors(spec.fields.size() * 2 * kBlock);
  Workspace w;
  for (std::int64_t start = 0; start < total; start += kBlock) {
    const int count = static_cast<int>(std::min<std::int64_t>(kBlock, total - start));
    for (int i = 0; i < count; ++i) {
      w.counter[i] = static_cast<std::uint64_t>(samples[start + i]);
      w.effect_sum[i] = 0.0;
    }
    dense_block(spec, count, w, out.dense + start * num_dense);
    std::int64_t* ids = out.ids + start * lookups;
    for (std::size_t j = 0; j < spec.fields.size(); ++j) {
      double* own_factors = in_pair[j] ? factors.data() + j * 2 * kBlock : nullptr;
      field_block(spec, j, count, w, own_factors, ids, lookups);
      ids += spec.fields[j].hotness;
    }
    finish_block(spec, count, w, factors, out.label + start, out.score + start);
  }
}

using Batch = void (*)(const SyntheticSpec&, const std::int64_t*, std::int64_t,
                       const SyntheticOutput&);

void batch_any(const SyntheticSpec& spec, const std::int64_t* samples, std::int64_t count,
               const SyntheticOutput& out) {
  all_blocks(spec, samples, count, out);
}

#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target("avx2"))) void batch_avx2(const SyntheticSpec& spec,
                                                const std::int64_t* samples, std::int64_t count,
                                                const SyntheticOutput& out) {
  all_blocks(spec, samples, count, out);
}

__attribute__((target("avx2,avx512f,avx512dq,avx512vl,avx512bw,prefer-vector-width=512"))) void
batch_avx512(const SyntheticSpec& spec, const std::int64_t* samples, std::int64_t count,
             const SyntheticOutput& out) {
  all_blocks(spec, samples, count, out);
}

Batch choose_batch() {
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw")) {
    return batch_avx512;
  }
  return __builtin_cpu_supports("avx2") ? batch_avx2 : batch_any;
}
#else
Batch choose_batch() { return batch_any; }
#endif

}  // namespace

std::int64_t synthetic_lookups(const SyntheticSpec& spec) {
  std::int64_t lookups = 0;
  for (const SyntheticField& field : spec.fields) lookups += field.hotness;
  return lookups;
}

const char* synthetic_check(const SyntheticSpec& spec) {
  constexpr std::int64_t kRowLimit = std::int64_t{1} << 31;
  if (spec.fields.empty()) return "there are no categorical fields";
  if (spec.block_samples == 0 || spec.block_ids == 0) return "block sizes must be positive";
  for (const SyntheticField& field : spec.fields) {
    if (field.cardinality < 1 || field.cardinality >= kRowLimit) return "rows must be in [1, 2^31)";
    if (field.multiplier < 1 || field.multiplier > kRowLimit) return "multiplier out of range";
    if (field.offset < 0 || field.offset >= field.cardinality) return "offset out of range";
    if (field.hotness < 1 || field.hotness > 1000) return "hotness must be in [1, 1000]";
  }
  const auto fields = static_cast<std::int64_t>(spec.fields.size());
  for (const SyntheticPair& pair : spec.pairs) {
    if (std::min(pair.a, pair.b) < 0 || std::max(pair.a, pair.b) >= fields) {
      return "a pair names a field that does not exist";
    }
  }
  return nullptr;
}

void synthetic_batch(const SyntheticSpec& spec, const std::int64_t* samples, std::int64_t count,
                     const SyntheticOutput& out) {
  static const Batch batch = choose_batch();
  batch(spec, samples, count, out);
}

}  // namespace tcxl
