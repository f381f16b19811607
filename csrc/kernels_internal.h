// The table of kernels that one build of the vector source (kernels_body.h) fills. Internal to
// kernels*.cc.
#pragma once

#include "kernels.h"

namespace tcxl::internal {

// TableLookups as plain pointers: the per-ISA translation units must not instantiate inline
// functions of the standard library, which the linker could pick for callers that run on lesser
// CPUs.
struct RowLookups {
  const uint64_t* rows = nullptr;
  const uint64_t* begin = nullptr;
  uint64_t num_rows = 0;
  uint64_t num_lookups = 0;
  const uint64_t* packed = nullptr;          // nullptr when wide
  const TableLookups::Wide* wide = nullptr;  // nullptr when packed
};

// How to sort `n` keys of rows below `table_rows` (kernels_body_sort.h).
struct SortPlan {
  int leading_bits = 0;  // > 0: first split into 2^leading_bits parts
  int passes = 0;        // then passes of `bits` bits each, the least significant first
  int bits = 0;
  bool is_few_rows = false;
  bool starts_in_spare = false;
  uint64_t num_counts = 0;
};

struct KernelTable {
  void (*lookup)(const TableView& table, const FeatureBags& bags, int64_t bag_begin,
                 int64_t bag_end, float* out, int64_t out_stride);
  uint64_t (*correct_lookups)(const CorrectJob& job, const RowLookups& lookups);
  void (*per_sample_weight_grad)(const TableView& table, const FeatureBags& bags, int64_t bag_begin,
                                 int64_t bag_end, const float* grad, int64_t grad_stride,
                                 float* weight_grad);
  void (*copy_rows_to_log)(const TableView& table, const uint64_t* rows,
                           const uint32_t* record_index, uint64_t count, const RecordColumns& log,
                           FlushFunction flush);
  // `lookups` stands for job.lookups, which the kernels do not touch.
  void (*update_rows)(const UpdateJob& job, const RowLookups& lookups, uint64_t row_begin,
                      uint64_t row_end);
  void (*row_grad_norm_sq)(const RowLookups& lookups, const float* grad, int64_t dim,
                           uint64_t row_begin, uint64_t row_end, double* row_norm_sq);
  bool (*has_non_finite)(const float* values, uint64_t n);
  void (*initialize_rows)(float* weight, int64_t dim, uint64_t row_begin, uint64_t row_end,
                          uint64_t seed, uint64_t table_key, float scale);
  void (*sort_keys)(const SortPlan& plan, uint64_t* keys, uint64_t* spare, uint64_t* part,
                    uint64_t n, uint32_t* counts);
  uint64_t (*count_rows)(const uint64_t* keys, uint64_t n);
  void (*find_rows)(const uint64_t* keys, uint64_t n, uint64_t count, uint64_t* rows,
                    uint64_t* begin);
};

// nullptr where the compiler does not target that ISA.
const KernelTable* scalar_kernels();
const KernelTable* avx2_kernels();
const KernelTable* avx512_kernels();

// The table in use (kernels.cc).
const KernelTable& current_kernels();

// The CPU has SSE4.2's crc32 instruction; crc32c_sse42 may then be called. Defined in
// crc32c_sse42.cc.
bool has_crc32_instruction();
uint32_t crc32c_sse42(uint32_t crc, const void* data, size_t size);
// The CPU multiplies whole vectors without carries (vpclmulqdq). Defined there too.
extern const bool can_fold_crc;

}  // namespace tcxl::internal
