// Computing logic (paper: "computing logic" of CXL-MEM): lookup + reduce, gradient reduce + row
// update, and the copies of rows into undo-log records. Pure functions over plain pointers: no I/O,
// no threads, no locks.
//
// Same bits (docs/design.md): every function gives the same bits for every vector width and for
// every way of splitting its range among threads.
//  - sums over lookups run per element in lookup order, in chunks of kSumChunk lookups whose
//  partial sums
//    are added in order (a sum of at most kSumChunk lookups is one chunk that starts from zero);
//  - sums across a row use 16 virtual lanes (element k goes to lane k % 16, in order of k) and the
//  fixed tree
//    lane[i] += lane[i + 8], + 4, + 2, + 1;
//  - multiply and add are never fused; sqrt and divide are IEEE.
//
// Shapes: B bags, N lookups, R distinct rows, D embedding dim.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tcxl {

inline constexpr int64_t kSumChunk = 1024;
inline constexpr uint32_t kNoRecord = 0xffffffffu;

enum class Pooling : uint32_t { kSum = 0, kMean = 1 };
enum class OptimizerKind : uint32_t { kSgd = 0, kAdagrad = 1, kRowWiseAdagrad = 2 };

// Floats of optimizer state that a row of dim D carries: 0, D or 1.
inline constexpr int64_t state_dim(OptimizerKind kind, int64_t dim) {
  return kind == OptimizerKind::kSgd ? 0 : kind == OptimizerKind::kAdagrad ? dim : 1;
}

enum class Isa : uint32_t { kScalar = 0, kAvx2 = 1, kAvx512 = 2 };
Isa best_isa();     // what this CPU has
Isa current_isa();  // what the kernels use; best_isa() at start
bool use_isa(Isa);  // for tests and benchmarks; false if the CPU lacks it. Not thread-safe.
const char* isa_name(Isa);

// Makes a line durable on media that need it: clwb/clflushopt/clflush over [p, p + bytes). Never
// fences.
using FlushFunction = void (*)(const void* p, size_t bytes);
using FenceFunction = void (*)();
using ClockFunction = uint64_t (*)();  // nanoseconds

// A table: weights [rows][dim] and optimizer state [rows][state_floats()], both row-major and
// contiguous.
struct TableView {
  float* weight = nullptr;
  float* state = nullptr;  // nullptr when state_floats() is 0
  uint64_t rows = 0;
  int64_t dim = 0;
  OptimizerKind optimizer = OptimizerKind::kSgd;
  // With it the last word of a row's state is its checksum: crc32c over row number (8 bytes, little
  // endian), optimizer state, weights, continued from check_start, which covers the table.
  bool has_check = false;
  uint32_t check_start = 0;

  int64_t state_floats() const { return state_dim(optimizer, dim) + (has_check ? 1 : 0); }
};

// The bags of one feature of one batch.
struct FeatureBags {
  const int64_t* ids = nullptr;      // lookups of all bags, each already checked to be in [0, rows)
  const int64_t* offsets = nullptr;  // B + 1, into ids; bag b is ids[offsets[b] .. offsets[b + 1])
  const float* weights = nullptr;    // per-sample weights, parallel to ids; nullptr = all 1
  Pooling pooling =
      Pooling::kSum;   // kMean: the sum divided by the length of the bag, an empty bag gives 0
  int64_t column = 0;  // first column of this feature in the pooled output and its gradient
};

// Lookup + reduce of bags [bag_begin, bag_end): out[b * out_stride + bags.column + d]. Empty bags
// give zeros.
void lookup(const TableView& table, const FeatureBags& bags, int64_t bag_begin, int64_t bag_end,
            float* out, int64_t out_stride);

// Gradient of the per-sample weights: weight_grad[i] = coefficient of pooling * dot(grad of i's
// bag, row ids[i]) for the lookups of bags [bag_begin, bag_end). The dot product is a sum across a
// row (16 lanes, fixed tree).
void per_sample_weight_grad(const TableView& table, const FeatureBags& bags, int64_t bag_begin,
                            int64_t bag_end, const float* grad, int64_t grad_stride,
                            float* weight_grad);

// All lookups of one table in one batch, sorted by row (stable: lookup order within a row). One
// sort serves the undo log and the update. Buffers are kept between uses: no allocation once sizes
// have settled.
struct TableLookups {
  struct Wide {
    uint64_t row;
    uint64_t grad_offset;  // in floats, from the start of the pooled gradient
    float coefficient;     // per-sample weight, / bag length for kMean
    uint32_t unused;
  };
  bool is_wide = false;  // false: packed, every coefficient is 1, row and grad_offset fit 32 bits
  std::vector<uint64_t> packed;  // row << 32 | grad_offset
  std::vector<Wide> wide;
  std::vector<uint64_t> rows;  // R distinct rows, ascending
  std::vector<uint64_t>
      begin;  // R + 1: lookups of rows[r] are [begin[r], begin[r + 1]) of packed or wide

  uint64_t num_rows() const { return rows.size(); }
  uint64_t num_lookups() const { return is_wide ? wide.size() : packed.size(); }

  // Sorts the lookups of `features` (all of this table, in feature order, then bag order).
  // grad_stride: floats between two bags of the pooled gradient.
  void build(const FeatureBags* features, size_t num_features, int64_t num_bags,
             int64_t grad_stride, uint64_t table_rows);
};

// Where one table's undo records of one batch lie in the log: four columns of `count` records each,
// in the order of that batch's distinct rows (docs/format.md, "Undo frame"). crc[i] = crc32c over
// row[i] (8 bytes, little endian), state[i], weight[i], continued from crc_start (which covers pool
// uuid, life, batch and table).
struct RecordColumns {
  uint64_t* row = nullptr;
  uint32_t* crc = nullptr;
  float* state = nullptr;    // [count][state_floats()]
  float* weight = nullptr;   // [count][dim], 64-byte aligned
  uint64_t* done = nullptr;  // fused frames: block_tag of every complete block of records
  uint32_t crc_start = 0;
};

// What done[block] holds once the records of the block are persistent: never 0, and another value
// for another batch, life, table or pool.
uint64_t block_tag(const RecordColumns& columns, uint64_t block);

// Checksum of one record, as defined above.
uint32_t record_crc(const RecordColumns& columns, const TableView& table, uint64_t index);

// Copies the present bytes of rows[r] into record r, for each r of record_index[0 .. count)
// (nullptr: r = 0 .. count). Weights of whole 64-byte lines are written with non-temporal stores;
// the caller fences. `flush` (may be nullptr) is called for everything that was not written
// non-temporally.
void copy_rows_to_log(const TableView& table, const uint64_t* rows, const uint32_t* record_index,
                      uint64_t count, const RecordColumns& log, FlushFunction flush);

// Relaxed lookup: bags that were pooled before the batch before changed rows of the table.
struct CorrectJob {
  TableView table;
  const TableLookups* lookups = nullptr;   // of the pooled bags
  const uint64_t* changed_rows = nullptr;  // ascending
  uint64_t num_changed = 0;
  const float* before = nullptr;  // [num_changed][dim]: what these rows were
  float* out = nullptr;           // pooled output; TableLookups' grad_offset counts from here
};

// Adds coefficient * (row now - row before) for every lookup of a changed row: rows ascending, the
// lookups of one in their order. Returns the number of these lookups.
uint64_t correct_lookups(const CorrectJob& job);

// What the sampled blocks of an update took: copies to logs, sums of gradients, all of it.
struct UpdateTimes {
  uint64_t log_ns = 0, reduce_ns = 0, all_ns = 0;
};

struct UpdateJob {
  TableView table;
  const TableLookups* lookups = nullptr;
  const float* grad = nullptr;  // pooled gradient; TableLookups' grad_offset counts from here
  float learning_rate = 0, eps = 0;
  float grad_scale =
      1;  // multiplies the summed gradient of each row (clipping); 1 leaves the bits alone
  // Fused log: the update itself copies the rows, block after block, to records that have the
  // rows' own index, and makes them persistent before it stores. [row_begin, row_end) then begins
  // at a multiple of log_block_rows and ends at one or at the last row. 0: logged before.
  uint64_t log_block_rows = 0;
  RecordColumns own_log;
  FenceFunction fence = nullptr;
  // Overlap hand-off (protocol.md section 3): record of the next batch's log that holds distinct
  // row r, or kNoRecord. The row is copied there right after its update, while it is in cache.
  // nullptr: no hand-off.
  const uint32_t* next_record = nullptr;
  RecordColumns next_log;
  // Journal: takes each distinct row after its update, under the row's own index. nullptr: none.
  const RecordColumns* after = nullptr;
  FlushFunction flush =
      nullptr;  // called for each updated row and its state, and for hand-off records
  // Tables with checksums: takes the number of a row whose bytes are not those of its checksum. It
  // and the rows beside it stay as they are.
  uint64_t* damaged_row = nullptr;
  // For a profile: takes the time of every eighth block, read from `clock`. nullptr: none.
  UpdateTimes* times = nullptr;
  ClockFunction clock = nullptr;
};

// Tables with checksums: sets those of rows [begin, end).
void set_checks(const TableView& table, uint64_t begin, uint64_t end);
// Whether bytes of a row, the last word of `state` being the checksum, are those of its checksum.
bool is_row_whole(const TableView& table, uint64_t row, const float* state, const float* weight);
// The first row of [begin, end) whose bytes are not those of its checksum, or `end`.
uint64_t find_damaged_row(const TableView& table, uint64_t begin, uint64_t end);

// Updates distinct rows [row_begin, row_end) in place.
//   g = grad_scale * sum of coefficient * gradient over the row's lookups
//   SGD:               w -= lr * g
//   Adagrad:           s += g * g;        w -= lr * g / (sqrt(s) + eps)       (torch.optim.Adagrad)
//   row-wise Adagrad:  s += mean(g * g);  w -= (lr / (sqrt(s) + eps)) * g     (FBGEMM)
void update_rows(const UpdateJob& job, uint64_t row_begin, uint64_t row_end);

// Sum over distinct rows [row_begin, row_end) of |g|^2 (g as above without grad_scale), one double
// per row into row_norm_sq[r - row_begin]; the caller adds them in order of r.
void row_grad_norm_sq(const TableLookups& lookups, const float* grad, int64_t dim,
                      uint64_t row_begin, uint64_t row_end, double* row_norm_sq);

// True if any of the n floats is NaN or infinite.
bool has_non_finite(const float* values, uint64_t n);

// For each distinct row of `a`, its index among the distinct rows of `b`, or kNoRecord. Both
// ascending.
void match_rows(const std::vector<uint64_t>& a, const std::vector<uint64_t>& b,
                std::vector<uint32_t>& index_in_b);

// Initial weights of rows [row_begin, row_end) of the table at `weight`, a pure function of (seed,
// table_key, row, column): uniform in [-scale, scale). h = mix(mix(mix(seed ^ table_key) ^ row) ^
// column), mix = the SplitMix64 finaliser; u = (h >> 40) * 2^-24.
void initialize_rows(float* weight, int64_t dim, uint64_t row_begin, uint64_t row_end,
                     uint64_t seed, uint64_t table_key, float scale);

// Sets round-to-nearest and keeps denormals for the current thread while in scope (contract "same
// bits").
class FloatMode {
 public:
  FloatMode();
  ~FloatMode();
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
  uint64_t saved_;
};

}  // namespace tcxl
