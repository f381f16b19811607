// Undo log (paper: "batch-aware checkpoint"): a ring of frames, one a batch, each with the previous
// bytes of every row that the batch will change, and a directory of one-line descriptors. Writing
// the descriptor of batch n is setting its flag; no row of batch n changes before.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels.h"
#include "layout.h"
#include "store.h"

namespace tcxl {

// Where the columns of one batch lie inside its frame.
struct FramePlan {
  std::vector<layout::FrameSegment> segments;
  uint64_t bytes = 0;
  uint64_t records = 0;
};

// Adds a table's columns to a plan.
void add_segment(FramePlan& plan, size_t table, const TableView& view, uint64_t count);
// Gives every column of the plan its place behind a header of `header_bytes` and the segments.
void lay_out(FramePlan& plan, uint64_t header_bytes);
// The columns of a segment; crc_start: checksum of what tells this frame's records from others.
RecordColumns record_columns(std::byte* frame, const layout::FrameSegment& segment,
                             uint32_t crc_start);
// What is wrong with the segments of a frame of `bytes` bytes and `records` records; empty:
// nothing.
std::string segments_fault(std::span<const layout::FrameSegment> segments,
                           const std::vector<Table>& tables, uint64_t bytes, uint64_t records);

class UndoLog {
 public:
  explicit UndoLog(Store& store) : store_(store) {}

  // Takes the ring over from the geometry; drops all volatile bookkeeping.
  void attach();
  // A new, larger ring (geometry seq + 1). Frames in the old one stay valid where they are until
  // reclaimed.
  void grow(uint64_t ring_bytes, uint64_t frame_bytes_max);

  // Space for the frame of `batch`, the newest so far; false when the ring has none. Zeroes the
  // descriptor (P).
  bool reserve(uint64_t batch, uint64_t bytes, uint64_t& offset);
  // Gives back the newest reservations down to and including `batch`, and clears their flags (P).
  void release_from(uint64_t batch);
  // Frames of batches <= `batch` are not needed any more: kept for the horizon until their space is
  // wanted.
  void reclaim(uint64_t batch);
  // No horizon: the next frames take the places of the last, which are in cache.
  void give_up_kept();
  // Keeps the frames of the committed batches <= `batch` that an earlier process or life left.
  void adopt(uint64_t batch, uint64_t life);
  // The frame of the newest kept batch, if it is this one, is needed again.
  void hold(uint64_t batch);
  // The tables can be taken back to this batch, by the frames kept (not checked).
  uint64_t oldest() const { return oldest_; }
  bool has_room(uint64_t bytes) const;
  uint64_t used_bytes() const;  // of the present ring
  uint64_t ring_bytes() const { return ring_bytes_; }
  uint64_t live_frames() const { return live_.size() + retired_.size(); }

  RecordColumns columns(uint64_t offset, const layout::FrameSegment& segment, uint64_t batch,
                        uint64_t life) const;
  // Writes header and segments (P), then the descriptor (P): the flag. All records must be
  // persistent; of a fused frame none is, the update writes them block by block.
  void set_flag(uint64_t batch, uint64_t life, uint64_t offset, const FramePlan& plan,
                bool is_fused);

  // --- recovery: plain functions of the bytes
  std::optional<layout::Descriptor> find(uint64_t batch, uint64_t life) const;
  // The frame of a committed batch, whatever its life up to `life`. The entry of batch n is always
  // that of the history that leads to the commit: each life that trained n wrote it anew, and lives
  // after the last of these began at n or later.
  std::optional<layout::Descriptor> find_on_line(uint64_t batch, uint64_t life) const;
  // Whether check() would pass.
  bool is_sound(const layout::Descriptor& descriptor, bool is_committed) const;
  // Whether a flag of a later life than `life` is there: its life's first slot must have been, too.
  bool has_later_flag(uint64_t life) const;
  // Checks header, bounds and every record's checksum; kCorrupted says what is wrong. Only the
  // batch that was about to commit may have blocks that are not done.
  void check(const layout::Descriptor& descriptor, bool is_committed) const;
  // The segments of a sound frame: the tables it is of.
  std::span<const layout::FrameSegment> segments(const layout::Descriptor& descriptor) const {
    return open_frame(descriptor).segments;
  }
  // Puts the previous bytes of every record of a checked frame back (rows are distinct, so their
  // order does not matter), P.
  struct RolledBack {
    uint64_t records = 0;
    uint64_t changed = 0;  // rows that differed from their record
  };
  RolledBack roll_back(const layout::Descriptor& descriptor);
  // The rows that roll_back would put back: visit(table, row, their state, their weights).
  using VisitRow = std::function<void(uint64_t, uint64_t, const float*, const float*)>;
  void visit_rows(const layout::Descriptor& descriptor, const VisitRow& visit) const;

 private:
  template <typename... What>
  [[noreturn]] void fail_damaged(const layout::Descriptor& d, const What&... what) const;
  // The segments, once header and bounds are found good.
  struct Frame {
    bool is_fused = false;
    std::span<const layout::FrameSegment> segments;
  };
  Frame open_frame(const layout::Descriptor& descriptor) const;
  // Calls visit(columns, segment, first, end) for every range of records that hold a row's
  // previous bytes.
  template <typename Visit>
  void for_each_range(const layout::Descriptor& descriptor, const Frame& frame,
                      const Visit& visit) const;
  std::future<void> touch_later_half(const layout::Descriptor& d, const Frame& frame) const;
  layout::Descriptor* descriptor(uint64_t batch) const;
  std::optional<uint64_t> place_for(uint64_t bytes, size_t given_up) const;
  bool keep(const layout::Descriptor& descriptor);
  void clear_flag(uint64_t batch);
  void give_up_oldest();
  struct Live {
    uint64_t batch, begin, end;
  };
  Store& store_;
  uint64_t ring_offset_ = 0, ring_bytes_ = 0;
  std::deque<Live> live_;
  std::deque<Live> kept_;  // older than live_, not needed: the horizon
  uint64_t oldest_ = 0;
  std::deque<uint64_t> retired_;  // batches whose frames lie in an earlier, smaller ring
};

}  // namespace tcxl
