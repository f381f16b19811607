#include "undo_log.h"

#include <algorithm>
#include <cstring>

#include "crash_point.h"
#include "crc32c.h"
#include "errors.h"
#include "fault.h"

namespace tcxl {

using namespace layout;

namespace {

constexpr uint64_t kWorthTouching = 4096;  // records; below, a thread costs more

uint64_t num_blocks(const FrameSegment& segment) {
  const uint64_t rows = fused_block_rows(segment.dim);
  return (segment.count + rows - 1) / rows;
}

}  // namespace

void UndoLog::attach() {
  ring_offset_ = store_.geometry().ring_offset;
  ring_bytes_ = store_.geometry().ring_bytes;
  live_.clear();
  kept_.clear();
  retired_.clear();
  oldest_ = 0;
}

void UndoLog::grow(uint64_t ring_bytes, uint64_t frame_bytes_max) {
  const uint64_t offset = store_.allocate_log(ring_bytes);
  GeometryHeader g = store_.geometry();
  g.ring_offset = offset;
  g.ring_bytes = round_up(ring_bytes, kRegionAlign);
  g.frame_bytes_max = frame_bytes_max;
  store_.write_geometry(g);
  for (const Live& frame : live_) retired_.push_back(frame.batch);
  live_.clear();
  kept_.clear();  // they stay where they are, as long as the directory names them
  ring_offset_ = g.ring_offset;
  ring_bytes_ = g.ring_bytes;
}

void add_segment(FramePlan& plan, size_t table, const TableView& view, uint64_t count) {
  FrameSegment s{};
  s.table = table;
  s.count = count;
  s.dim = static_cast<uint32_t>(view.dim);
  s.state_floats = static_cast<uint32_t>(view.state_floats());
  plan.segments.push_back(s);
  plan.records += count;
}

void lay_out(FramePlan& plan, uint64_t header_bytes) {
  uint64_t at = header_bytes + plan.segments.size() * sizeof(FrameSegment);
  auto take = [&](uint64_t bytes) {
    const uint64_t begin = at;
    at = round_up(at + bytes, kLine);
    return begin;
  };
  for (FrameSegment& segment : plan.segments) {
    segment.row_offset = take(segment.count * sizeof(uint64_t));
    segment.crc_offset = take(segment.count * sizeof(uint32_t));
    segment.done_offset = take(num_blocks(segment) * sizeof(uint64_t));
    segment.state_offset = take(segment.count * segment.state_floats * sizeof(float));
    segment.weight_offset = take(segment.count * segment.dim * sizeof(float));
  }
  plan.bytes = at;
}

Descriptor* UndoLog::descriptor(uint64_t batch) const {
  return store_.log().at<Descriptor>(kDirectory + batch % kDirectoryEntries * kDescriptorBytes);
}

void UndoLog::clear_flag(uint64_t batch) {
  Descriptor* d = descriptor(batch);
  if (d->magic == 0 || has_fault(Fault::kStaleFlagKept)) return;
  std::memset(static_cast<void*>(d), 0, sizeof *d);
  if (has_fault(Fault::kNoFlagClearPersist)) return;
  store_.persistence().persist(d, sizeof *d);
}

// Where in the ring the next frame goes once so many of the kept frames are given up, nothing when
// it has no room.
std::optional<uint64_t> UndoLog::place_for(uint64_t bytes, size_t given_up) const {
  if (live_frames() + 1 >= kDirectoryEntries || bytes > ring_bytes_) return std::nullopt;
  if (live_.empty() && given_up == kept_.size()) return 0;
  const uint64_t tail = given_up < kept_.size() ? kept_[given_up].begin : live_.front().begin;
  const Live& last = live_.empty() ? kept_.back() : live_.back();
  const uint64_t head = last.end;
  const bool wrapped = last.begin < tail;
  if (head + bytes <= (wrapped ? tail : ring_bytes_)) return head;
  if (!wrapped && bytes <= tail) return 0;
  return std::nullopt;
}

bool UndoLog::has_room(uint64_t bytes) const {
  return place_for(std::max(bytes, kLine), kept_.size()).has_value();
}

void UndoLog::give_up_oldest() {
  oldest_ = kept_.front().batch;
  kept_.pop_front();
}

bool UndoLog::reserve(uint64_t batch, uint64_t bytes, uint64_t& offset) {
  TCXL_ASSERT(live_.empty() || live_.back().batch < batch);
  bytes = std::max(bytes, kLine);
  if (!has_room(bytes)) return false;
  auto begin = place_for(bytes, 0);
  for (; !begin; begin = place_for(bytes, 0)) give_up_oldest();
  // The entry is that of an older batch, too.
  while (!kept_.empty() && kept_.front().batch + kDirectoryEntries <= batch) give_up_oldest();
  if (batch >= kDirectoryEntries) oldest_ = std::max(oldest_, batch - kDirectoryEntries);
  // The old flag at this place is of a reclaimed batch, or of an abandoned announce: gone before
  // new records.
  clear_flag(batch);
  live_.push_back({batch, *begin, *begin + bytes});
  offset = ring_offset_ + *begin;
  return true;
}

void UndoLog::release_from(uint64_t batch) {
  while (!live_.empty() && live_.back().batch >= batch) {
    clear_flag(live_.back().batch);
    live_.pop_back();
  }
  while (live_.empty() && !retired_.empty() && retired_.back() >= batch) {
    clear_flag(retired_.back());
    retired_.pop_back();
  }
}

void UndoLog::reclaim(uint64_t batch) {
  while (!retired_.empty() && retired_.front() <= batch) retired_.pop_front();
  for (; !live_.empty() && live_.front().batch <= batch; live_.pop_front())
    kept_.push_back(live_.front());
  if (has_fault(Fault::kReclaimEarly)) give_up_kept();
}

void UndoLog::give_up_kept() {
  while (!kept_.empty()) give_up_oldest();
}

uint64_t UndoLog::used_bytes() const {
  uint64_t bytes = 0;
  for (const Live& frame : live_) bytes += frame.end - frame.begin;
  return bytes;
}

std::string segments_fault(std::span<const FrameSegment> segments, const std::vector<Table>& tables,
                           uint64_t bytes, uint64_t records) {
  auto is_outside = [&](uint64_t offset, uint64_t count, uint64_t width) {
    return offset > bytes || (width > 0 && count > (bytes - offset) / width);
  };
  uint64_t found = 0;
  for (const FrameSegment& s : segments) {
    if (s.table >= tables.size()) return text("table number ", s.table, " is unknown");
    const TableView& view = tables[s.table].view;
    const auto states = static_cast<uint64_t>(view.state_floats());
    if (s.dim != static_cast<uint64_t>(view.dim) || s.state_floats != states)
      return text("table ", s.table, " has another shape");
    if (is_outside(s.row_offset, s.count, sizeof(uint64_t)) ||
        is_outside(s.crc_offset, s.count, sizeof(uint32_t)) ||
        is_outside(s.done_offset, num_blocks(s), sizeof(uint64_t)) ||
        is_outside(s.state_offset, s.count, states * sizeof(float)) ||
        is_outside(s.weight_offset, s.count, s.dim * sizeof(float)))
      return "a column is outside the frame";
    const uint64_t offsets =
        s.row_offset | s.crc_offset | s.done_offset | s.state_offset | s.weight_offset;
    if (offsets % kLine != 0) return "a column is not aligned";
    found += s.count;
  }
  return found == records ? "" : text("it has ", found, " records, not ", records);
}

RecordColumns record_columns(std::byte* frame, const FrameSegment& segment, uint32_t crc_start) {
  RecordColumns c;
  c.row = reinterpret_cast<uint64_t*>(frame + segment.row_offset);
  c.crc = reinterpret_cast<uint32_t*>(frame + segment.crc_offset);
  c.state = reinterpret_cast<float*>(frame + segment.state_offset);
  c.weight = reinterpret_cast<float*>(frame + segment.weight_offset);
  c.done = reinterpret_cast<uint64_t*>(frame + segment.done_offset);
  c.crc_start = crc_start;
  return c;
}

RecordColumns UndoLog::columns(uint64_t offset, const FrameSegment& segment, uint64_t batch,
                               uint64_t life) const {
  uint64_t identity[3] = {batch, life, segment.table};
  if (has_fault(Fault::kNoBatchAndLifeInCrc)) identity[0] = identity[1] = 0;
  return record_columns(store_.log().base() + offset, segment,
                        store_.crc_of(identity, sizeof identity));
}

void UndoLog::set_flag(uint64_t batch, uint64_t life, uint64_t offset, const FramePlan& plan,
                       bool is_fused) {
  FrameHeader header{};
  if (plan.records > 0) {
    header.is_fused = is_fused ? 1 : 0;
    header.magic = kFrameMagic;
    header.batch = batch;
    header.life = life;
    header.bytes = plan.bytes;
    header.records = plan.records;
    header.num_segments = plan.segments.size();
    const uint64_t segment_bytes = plan.segments.size() * sizeof(FrameSegment);
    header.crc = crc32c(store_.crc_of(&header, sizeof header), plan.segments.data(), segment_bytes);
    std::byte* frame = store_.log().base() + offset;
    std::memcpy(frame, &header, sizeof header);
    std::memcpy(frame + sizeof header, plan.segments.data(), segment_bytes);
    for (const FrameSegment& segment : plan.segments) {
      if (!is_fused) break;
      const uint64_t bytes = num_blocks(segment) * sizeof(uint64_t);
      std::memset(frame + segment.done_offset, 0, bytes);
      store_.persistence().flush(frame + segment.done_offset, bytes);
    }
    if (!has_fault(Fault::kNoFrameHeaderPersist))
      store_.persistence().persist(frame, sizeof header + segment_bytes);
  }
  Descriptor d{};
  d.magic = kDescriptorMagic;
  d.batch = batch;
  d.life = life;
  d.offset = offset;
  d.bytes = plan.records > 0 ? plan.bytes : 0;
  d.records = plan.records;
  d.frame_crc = header.crc;
  d.crc = store_.checksum(d);
  *descriptor(batch) = d;
  if (!has_fault(Fault::kNoFlagPersist)) store_.persistence().persist(descriptor(batch), sizeof d);
}

std::optional<Descriptor> UndoLog::find(uint64_t batch, uint64_t life) const {
  const Descriptor d = *descriptor(batch);
  const bool is_named =
      (d.batch == batch && d.life == life) || has_fault(Fault::kNoBatchAndLifeInCrc);
  if (d.magic != kDescriptorMagic || d.crc != store_.checksum(d) || !is_named) return std::nullopt;
  return d;
}

bool UndoLog::has_later_flag(uint64_t life) const {
  for (uint64_t entry = 0; entry < kDirectoryEntries; ++entry) {
    const Descriptor d = *descriptor(entry);
    if (d.magic == kDescriptorMagic && d.life > life && d.crc == store_.checksum(d)) return true;
  }
  return false;
}

template <typename... What>
void UndoLog::fail_damaged(const Descriptor& d, const What&... what) const {
  fail(ErrorKind::kCorrupted, "undo log of batch ", d.batch, " is damaged: ", what...,
       "\n  where: pool '", store_.path(), "', log region, frame at byte ", d.offset,
       "\n  state: no row was changed; batch ", d.batch, " cannot be rolled back\n  do:    ",
       // Rows of a batch in flight may have changed: without its records they are of no batch.
       store_.slot() && d.batch > store_.slot()->batch ? copy_advice(store_.path())
                                                       : repair_advice(store_.path()));
}

UndoLog::Frame UndoLog::open_frame(const Descriptor& d) const {
  if (d.bytes == 0) return {};
  const uint64_t end = store_.log().bytes();
  // Not in the head either: recovery writes there between check and use.
  if (d.offset % kLine != 0 || d.bytes > end || d.offset > end - d.bytes || d.offset < kHeadBytes ||
      d.bytes < sizeof(FrameHeader))
    fail_damaged(d, "its place is outside the log");
  const std::byte* frame = store_.log().base() + d.offset;
  FrameHeader header;
  std::memcpy(&header, frame, sizeof header);
  if (header.magic != kFrameMagic || header.batch != d.batch || header.life != d.life ||
      header.bytes != d.bytes || header.records != d.records || header.is_fused > 1 ||
      header.num_segments > (d.bytes - sizeof header) / sizeof(FrameSegment))
    fail_damaged(d, "its header does not match its flag");
  const auto* segments = reinterpret_cast<const FrameSegment*>(frame + sizeof header);
  FrameHeader blank = header;
  blank.crc = 0;
  const uint32_t crc = crc32c(store_.crc_of(&blank, sizeof blank), segments,
                              header.num_segments * sizeof(FrameSegment));
  if (crc != header.crc || crc != d.frame_crc)
    fail_damaged(d, "its header has checksum ", crc, ", expected ", d.frame_crc);

  const std::span all(segments, header.num_segments);
  const std::string fault = segments_fault(all, store_.tables(), d.bytes, d.records);
  if (!fault.empty()) fail_damaged(d, fault);
  return {header.is_fused != 0, all};
}

template <typename Visit>
void UndoLog::for_each_range(const Descriptor& d, const Frame& frame, const Visit& visit) const {
  for (const FrameSegment& s : frame.segments) {
    const RecordColumns c = columns(d.offset, s, d.batch, d.life);
    if (!frame.is_fused) {
      visit(c, s, 0, s.count);
      continue;
    }
    const uint64_t rows = fused_block_rows(s.dim);
    for (uint64_t block = 0; block < num_blocks(s); ++block) {
      if (c.done[block] != 0) visit(c, s, block * rows, std::min(s.count, (block + 1) * rows));
    }
  }
}

void UndoLog::check(const Descriptor& d, bool is_committed) const {
  const Frame frame = open_frame(d);
  uint64_t records = 0;
  for_each_range(
      d, frame, [&](const RecordColumns& c, const FrameSegment& s, uint64_t first, uint64_t end) {
        const Table& table = store_.tables()[s.table];
        const uint64_t block = first / fused_block_rows(s.dim);
        if (frame.is_fused && c.done[block] != block_tag(c, block))
          fail_damaged(d, "block ", block, " of table '", table.name, "' has a wrong tag");
        for (uint64_t r = first; r < end; ++r) {
          if (c.row[r] < table.view.rows && record_crc(c, table.view, r) == c.crc[r]) continue;
          fail_damaged(d, "record ", r, " of table '", table.name, "' (row ", c.row[r],
                       ") has a wrong checksum");
        }
        records += end - first;
      });
  if (is_committed && records != d.records)
    fail_damaged(d, "only ", records, " of ", d.records, " records are there");
}

void UndoLog::visit_rows(const Descriptor& d, const VisitRow& visit) const {
  for_each_range(d, open_frame(d),
                 [&](const RecordColumns& c, const FrameSegment& s, uint64_t first, uint64_t end) {
                   for (uint64_t r = first; r < end; ++r)
                     visit(s.table, c.row[r], c.state + r * s.state_floats, c.weight + r * s.dim);
                 });
}

// Rows are scattered: most are the first touch of a page, which the kernel has to map. A second
// thread has the later half of them mapped, by reading, while the earlier half is put back.
std::future<void> UndoLog::touch_later_half(const Descriptor& d, const Frame& frame) const {
  if (d.records < kWorthTouching) return {};
  return std::async(std::launch::async, [this, d, frame] {
    const auto touch = [](const float* p) {
      static_cast<void>(*static_cast<const volatile float*>(p));
    };
    uint64_t number = 0;
    for_each_range(
        d, frame, [&](const RecordColumns& c, const FrameSegment& s, uint64_t first, uint64_t end) {
          const TableView& view = store_.tables()[s.table].view;
          for (uint64_t r = first; r < end; ++r) {
            if (number++ < d.records / 2) continue;
            touch(view.weight + c.row[r] * s.dim);
            if (s.state_floats > 0) touch(view.state + c.row[r] * s.state_floats);
          }
        });
  });
}

UndoLog::RolledBack UndoLog::roll_back(const Descriptor& d) {
  RolledBack result;
  const Frame frame = open_frame(d);
  const std::future<void> touching = touch_later_half(d, frame);
  const Persistence& persistence = store_.persistence();
  const bool is_rewind = store_.slot()->rolling_back == kRewinding;
  if (has_fault(Fault::kRewindCutsFirst) && is_rewind) clear_flag(d.batch);
  for_each_range(
      d, frame, [&](const RecordColumns& c, const FrameSegment& s, uint64_t first, uint64_t end) {
        const TableView& view = store_.tables()[s.table].view;
        const uint64_t weight_bytes = s.dim * sizeof(float),
                       state_bytes = s.state_floats * sizeof(float);
        for (uint64_t r = first; r < end; ++r) {
          if (result.records++ == d.records / 2 && touching.valid()) touching.wait();
          float* weight = view.weight + c.row[r] * s.dim;
          float* state = s.state_floats > 0 ? view.state + c.row[r] * s.state_floats : weight;
          const float* old_weight = c.weight + r * s.dim;
          const float* old_state = s.state_floats > 0 ? c.state + r * s.state_floats : old_weight;
          if (std::memcmp(weight, old_weight, weight_bytes) != 0 ||
              std::memcmp(state, old_state, state_bytes) != 0) {
            ++result.changed;
            crash_point("recovery: row");
            std::memcpy(weight, old_weight, weight_bytes);
            std::memcpy(state, old_state, state_bytes);
          }
          // Equal bytes too: an earlier recovery may have stored them and been killed
          // before its fence.
          if (has_fault(Fault::kRecoveryWithoutRowFlush) ||
              (has_fault(Fault::kRewindRowsNotPersisted) && is_rewind))
            continue;
          persistence.flush(weight, weight_bytes);
          persistence.flush(state, state_bytes);
        }
      });
  persistence.fence();
  return result;
}

}  // namespace tcxl
