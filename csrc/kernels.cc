// Dispatch of the kernels to the widest vectors that the CPU has.
#include "kernels.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "crc32c.h"
#include "kernels_internal.h"

namespace tcxl {
namespace {

const internal::KernelTable* kernels_for(Isa isa) {
  switch (isa) {
    case Isa::kAvx512:
      return internal::avx512_kernels();
    case Isa::kAvx2:
      return internal::avx2_kernels();
    case Isa::kScalar:
      return internal::scalar_kernels();
  }
  return nullptr;
}

bool cpu_has(Isa isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
  switch (isa) {
    case Isa::kScalar:
      return true;
    case Isa::kAvx2:
      return has_avx2;
    case Isa::kAvx512:
      return has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  }
  return false;
#else
  return isa == Isa::kScalar;
#endif
}

bool is_usable(Isa isa) { return cpu_has(isa) && kernels_for(isa) != nullptr; }

struct Current {
  Isa isa = best_isa();
  const internal::KernelTable* kernels = kernels_for(isa);
};

Current& current() {
  static Current value;
  return value;
}

internal::RowLookups pointers(const TableLookups& lookups) {
  return {
      .rows = lookups.rows.data(),
      .begin = lookups.begin.data(),
      .num_rows = lookups.num_rows(),
      .num_lookups = lookups.num_lookups(),
      .packed = lookups.is_wide ? nullptr : lookups.packed.data(),
      .wide = lookups.is_wide ? lookups.wide.data() : nullptr,
  };
}

#if defined(__aarch64__)
uint64_t float_control() {
  uint64_t value;
  asm volatile("mrs %0, fpcr" : "=r"(value));
  return value;
}
void set_float_control(uint64_t value) { asm volatile("msr fpcr, %0" : : "r"(value) : "memory"); }
constexpr uint64_t kPlainFloats = 0;  // round to nearest, denormals kept, no traps
#elif defined(__x86_64__)
uint64_t float_control() { return _mm_getcsr(); }
void set_float_control(uint64_t value) { _mm_setcsr(static_cast<uint32_t>(value)); }
constexpr uint64_t kPlainFloats =
    0x1f80;  // round to nearest, denormals kept, all exceptions masked
#else
#error "FloatMode: set the floating-point control register of this CPU here"
#endif

}  // namespace

const internal::KernelTable& internal::current_kernels() { return *current().kernels; }

Isa best_isa() {
  if (is_usable(Isa::kAvx512)) return Isa::kAvx512;
  return is_usable(Isa::kAvx2) ? Isa::kAvx2 : Isa::kScalar;
}

Isa current_isa() { return current().isa; }

bool use_isa(Isa isa) {
  if (!is_usable(isa)) return false;
  current().isa = isa;
  current().kernels = kernels_for(isa);
  return true;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return "scalar";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

void lookup(const TableView& table, const FeatureBags& bags, int64_t bag_begin, int64_t bag_end,
            float* out, int64_t out_stride) {
  internal::current_kernels().lookup(table, bags, bag_begin, bag_end, out, out_stride);
}

uint64_t correct_lookups(const CorrectJob& job) {
  return internal::current_kernels().correct_lookups(job, pointers(*job.lookups));
}

void per_sample_weight_grad(const TableView& table, const FeatureBags& bags, int64_t bag_begin,
                            int64_t bag_end, const float* grad, int64_t grad_stride,
                            float* weight_grad) {
  internal::current_kernels().per_sample_weight_grad(table, bags, bag_begin, bag_end, grad,
                                                     grad_stride, weight_grad);
}

// The crc alone could be 0, or a flipped bit away from it, which stands for a block not done.
uint64_t block_tag(const RecordColumns& columns, uint64_t block) {
  constexpr uint64_t kDone = 0x454e4f44ull << 32;  // "DONE"
  return kDone | crc32c(columns.crc_start, &block, sizeof block);
}

uint32_t record_crc(const RecordColumns& columns, const TableView& table, uint64_t index) {
  const auto dim = static_cast<uint64_t>(table.dim);
  const auto state_floats = static_cast<uint64_t>(table.state_floats());
  uint32_t crc = crc32c(columns.crc_start, columns.row + index, sizeof(uint64_t));
  if (state_floats > 0)
    crc = crc32c(crc, columns.state + index * state_floats, state_floats * sizeof(float));
  return crc32c(crc, columns.weight + index * dim, dim * sizeof(float));
}

void copy_rows_to_log(const TableView& table, const uint64_t* rows, const uint32_t* record_index,
                      uint64_t count, const RecordColumns& log, FlushFunction flush) {
  internal::current_kernels().copy_rows_to_log(table, rows, record_index, count, log, flush);
}

void update_rows(const UpdateJob& job, uint64_t row_begin, uint64_t row_end) {
  internal::current_kernels().update_rows(job, pointers(*job.lookups), row_begin, row_end);
}

namespace {
uint32_t row_check(const TableView& table, uint64_t row, const float* state, const float* weight) {
  const auto states = static_cast<size_t>(state_dim(table.optimizer, table.dim));
  uint32_t crc = crc32c(table.check_start, &row, sizeof row);
  if (states > 0) crc = crc32c(crc, state, states * sizeof(float));
  return crc32c(crc, weight, static_cast<size_t>(table.dim) * sizeof(float));
}
}  // namespace

void set_checks(const TableView& table, uint64_t begin, uint64_t end) {
  const auto states = static_cast<uint64_t>(table.state_floats());
  const auto dim = static_cast<uint64_t>(table.dim);
  for (uint64_t row = begin; row < end; ++row) {
    float* state = table.state + row * states;
    const uint32_t crc = row_check(table, row, state, table.weight + row * dim);
    std::memcpy(state + states - 1, &crc, sizeof crc);
  }
}

bool is_row_whole(const TableView& table, uint64_t row, const float* state, const float* weight) {
  const uint32_t crc = row_check(table, row, state, weight);
  return std::memcmp(state + table.state_floats() - 1, &crc, sizeof crc) == 0;
}

uint64_t find_damaged_row(const TableView& table, uint64_t begin, uint64_t end) {
  const auto states = static_cast<uint64_t>(table.state_floats());
  const auto dim = static_cast<uint64_t>(table.dim);
  for (uint64_t row = begin; row < end; ++row) {
    if (!is_row_whole(table, row, table.state + row * states, table.weight + row * dim)) return row;
  }
  return end;
}

void row_grad_norm_sq(const TableLookups& lookups, const float* grad, int64_t dim,
                      uint64_t row_begin, uint64_t row_end, double* row_norm_sq) {
  internal::current_kernels().row_grad_norm_sq(pointers(lookups), grad, dim, row_begin, row_end,
                                               row_norm_sq);
}

bool has_non_finite(const float* values, uint64_t n) {
  return internal::current_kernels().has_non_finite(values, n);
}

void initialize_rows(float* weight, int64_t dim, uint64_t row_begin, uint64_t row_end,
                     uint64_t seed, uint64_t table_key, float scale) {
  internal::current_kernels().initialize_rows(weight, dim, row_begin, row_end, seed, table_key,
                                              scale);
}

FloatMode::FloatMode() : saved_(float_control()) { set_float_control(kPlainFloats); }
FloatMode::~FloatMode() { set_float_control(saved_); }

}  // namespace tcxl
