// One training step's sparse side: the indices as they were announced (copied, checked), their sort
// by row, and the place of their undo records. Steps are recycled, so that nothing is allocated
// once sizes have settled.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels.h"
#include "undo_log.h"

namespace tcxl {

struct GroupFeature {
  std::string name;
  size_t table;
  Pooling pooling;
  int64_t column;       // first column in the pooled output
  int64_t padding_row;  // lookups of this row are left out; -1: none
};

// The features of one module: what one lookup call pools together.
struct Group {
  std::vector<GroupFeature> features;
  int64_t stride = 0;  // columns of the pooled output
};

// Raw view of what the caller passes for one group; feature-major like TorchRec's
// KeyedJaggedTensor.
struct GroupInput {
  size_t group = 0;
  int64_t bags = 0;
  const void* values = nullptr;
  bool values_are_int32 = false;
  int64_t num_values = 0;
  const void* offsets = nullptr;  // F * B + 1
  bool offsets_are_int32 = false;
  int64_t num_offsets = 0;
  const float* weights = nullptr;  // parallel to values or nullptr
};

struct GroupBatch {
  size_t group = 0;
  int64_t bags = 0;
  std::vector<int64_t> ids, offsets;
  std::vector<float> weights;
  bool has_weights = false;
  bool is_filtered = false;  // padding was left out of ids, offsets and weights
  // What the caller passed, kept when filtered, to be compared with the lookup.
  std::vector<int64_t> given_ids, given_offsets;
  std::vector<float> given_weights;
  std::vector<FeatureBags> features;

  size_t num_given() const { return is_filtered ? given_ids.size() : ids.size(); }
  // Copies and checks. kIndex / kValue name feature, bag and position before anything is kept.
  void assign(const GroupInput& input, const Group& group_spec, const std::vector<Table>& tables);
  // A value per lookup that was kept, put where the caller's lookups are; padding gets 0.
  void spread(const Group& group_spec, const std::vector<float>& kept, float* result) const;
  // Whether the input is bit for bit what was announced.
  bool equals(const GroupInput& input, const Group& group_spec) const;
};

struct StepTable {
  size_t table = 0;
  size_t group = 0;                   // index into Step::groups
  std::vector<FeatureBags> features;  // the group's features that look up in this table
  TableLookups lookups;
  std::vector<uint32_t>
      next_record;  // overlap hand-off: record of the next step's log, per distinct row
  std::vector<uint32_t> own_records;  // records that this step must read from the table itself
  RecordColumns columns;
};

// Pooled bags of a step, from the rows of batch `base`, before the batch in between changed them
// (relaxed lookup). Complete once that batch has committed.
struct EarlyLookup {
  static constexpr uint64_t kNone = ~0ull;
  uint64_t base = kNone;
  std::vector<std::vector<float>> pooled;  // per group: [bags][stride]
  std::vector<uint64_t> first_block;       // per group, and the end
  std::atomic<uint64_t> next_block{0};
};

enum class LogState { kNone, kWriting, kComplete };

struct Step {
  uint64_t id = 0;
  uint64_t batch = 0;  // valid once a frame is reserved
  std::vector<GroupBatch> groups;
  std::vector<StepTable> tables;
  size_t num_tables = 0;        // used entries of `tables`
  std::vector<uint32_t> place;  // per table of the pool: its entry in `tables`, or kNoRecord

  // Guarded by the engine's mutex.
  bool is_sorting = false, is_sorted = false;
  LogState log = LogState::kNone;
  bool overlap_pending = false;  // the batch before still has to hand its rows over
  bool is_next_mapped = false;   // next_record of the tables is ready: the update hands rows over
  bool hand_off_closed = false;  // the update began before the next step was mapped
  bool has_flag = false;
  bool is_fused = false;            // the update writes the undo records
  bool is_previous_logged = false;  // journal: bytes of rows that change first since the base
  uint64_t previous_ticket = 0;     // what must be durable before the update
  bool is_blocked = false;          // the ring had no room; tried again after the next reclaim
  uint64_t frame_offset = 0;
  uint64_t background_ns = 0;  // what sort and undo records took the background thread
  FramePlan plan;
  EarlyLookup early;

  // The entry of a table, nullptr when the step does not touch it.
  StepTable* find(size_t table) {
    return table < place.size() && place[table] != kNoRecord ? &tables[place[table]] : nullptr;
  }
  uint64_t num_rows() const;
  uint64_t num_lookups() const;
};

}  // namespace tcxl
