// Relaxed lookup (paper: "relaxed embedding lookup"; docs/design.md): batch N + 1 is pooled while
// batch N is still in the dense part, from rows as they are before N's update, and corrected once N
// has committed:
//
//   pooled = lookup of the rows before N;
//   pooled += coefficient * (row after N - row before N), for each lookup of a row in N's undo log,
//             rows ascending, lookups of a row in their order.
//
// fp32; always this formula, whether the lookup was early or not, so that a resume gives the same
// bits. The rows before N are those of its undo log.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "step.h"
#include "store.h"
#include "undo_log.h"

namespace tcxl {

// The rows that the committed batch changed, as they were before it: where they lie in the log.
class PreviousRows {
 public:
  explicit PreviousRows(const Store& store) : store_(store) {}

  // Nothing is known of the batch before: lookups are strict.
  void forget() { is_known_ = false; }
  bool is_known() const { return is_known_; }
  uint64_t batch() const { return batch_; }
  // Those of a step that has just committed.
  void take(const Step& step);
  // Those of a checked frame.
  void take(const layout::Descriptor& descriptor, std::span<const layout::FrameSegment> segments);

  // Adds the changes to bags of `lookups` at `out`, pooled before them; returns the number of
  // lookups corrected.
  uint64_t correct(size_t table, const TableLookups& lookups, float* out) const;
  // Pools `features`, all of one table, from its rows as they were before, into out[bags][stride].
  void pool_before(size_t table, const TableLookups& lookups,
                   const std::vector<FeatureBags>& features, int64_t bags, float* out,
                   int64_t stride) const;

 private:
  void take(uint64_t batch, uint64_t offset, std::span<const layout::FrameSegment> segments);
  const layout::FrameSegment* find(size_t table) const;
  const uint64_t* rows(const layout::FrameSegment& segment) const;
  const float* weights(const layout::FrameSegment& segment) const;

  const Store& store_;
  bool is_known_ = false;
  uint64_t batch_ = 0;
  uint64_t offset_ = 0;
  std::vector<layout::FrameSegment> segments_;
  std::vector<uint32_t> place_;  // per table: its entry in segments_, or kNoRecord
};

}  // namespace tcxl
