// Areas of the dense log: how many there are, and which one a new generation goes to.
#include <algorithm>
#include <cstring>
#include <vector>

#include "dense_log.h"
#include "errors.h"

namespace tcxl {

using namespace layout;

namespace {

constexpr uint64_t kShareOfLog = 10;  // a tenth of the undo log, for generations of the horizon

}  // namespace

// Whether a generation of so many bytes may be written there.
bool DenseLog::is_target(uint32_t area, uint64_t bytes) const {
  return store_.geometry().dense_bytes[area] >= bytes && !(newest_ && newest_->area == area);
}

// What is left of the region that the last areas were placed in: regions are larger than areas.
DenseLog::Space DenseLog::slack() const {
  const GeometryHeader& g = store_.geometry();
  uint64_t end = 0;
  for (uint32_t area = 0; area < kDenseAreas; ++area) {
    if (g.dense_bytes[area] == 0) continue;  // its place means nothing, and was not checked
    end = std::max(end, g.dense_offset[area] + g.dense_bytes[area]);
  }
  return {end, round_up(end, kRegionAlign) - end};
}

// How many of the areas wanted may take space of their own from the medium.
uint64_t DenseLog::extra_areas(const Horizon& horizon, uint64_t area_bytes, uint64_t wanted) const {
  if (horizon.keep != Horizon::kAuto) return wanted;
  uint64_t taken = 0;
  for (const uint64_t bytes : store_.geometry().dense_bytes) taken += bytes;
  const uint64_t budget = horizon.ring_bytes / kShareOfLog + 2 * area_bytes;
  if (taken >= budget) return 0;
  return std::min(wanted, (budget - taken) / kRegionAlign * kRegionAlign / area_bytes);
}

// Gives the space to areas that have none or too little. Returns how many there were.
uint64_t DenseLog::place(GeometryHeader& g, Space space, uint64_t count, uint64_t area_bytes) {
  uint64_t placed = 0;
  for (uint32_t area = 0; area < kDenseAreas && placed < count; ++area) {
    const bool is_newest = newest_ && newest_->area == area;
    if (g.dense_bytes[area] >= area_bytes || is_newest || space.bytes < area_bytes) continue;
    g.dense_offset[area] = space.offset;
    g.dense_bytes[area] = area_bytes;
    held_[area].reset();
    std::byte* header = store_.log().base() + space.offset;
    std::memset(header, 0, kPage);
    store_.persistence().persist(header, kPage);
    space.offset += area_bytes;
    space.bytes -= area_bytes;
    ++placed;
  }
  return placed;
}

// Areas for the last two generations, and for those that are to be kept. Throws only if there is
// none to write to.
void DenseLog::ensure_areas(uint64_t bytes, const Horizon& horizon) {
  uint64_t have = newest_ ? 1 : 0, targets = 0;
  for (uint32_t area = 0; area < kDenseAreas; ++area) targets += is_target(area, bytes) ? 1 : 0;
  have += targets;
  // Those of the horizon once sizes are known: optimizers create their state in the first step.
  const uint64_t most = kDenseAreas - 2;
  const uint64_t keep = horizon.ring_bytes == 0 ? 0 : std::min(horizon.keep, most);
  if (have >= 2 + keep || (targets > 0 && is_full_)) return;
  // A quarter more, so that state that appears later rarely moves it.
  const uint64_t area_bytes = round_up(bytes + (bytes - kDenseBlob) / 4, kPage);
  uint64_t wanted = 2 + keep - have;
  const uint64_t needed = std::min<uint64_t>(wanted, have >= 2 ? 0 : 2 - have);
  GeometryHeader g = store_.geometry();
  const uint64_t from_slack = place(g, slack(), wanted, area_bytes);
  wanted -= from_slack;
  const uint64_t still_needed = needed - std::min(needed, from_slack);
  const uint64_t more = still_needed + extra_areas(horizon, area_bytes, wanted - still_needed);
  bool has_grown = from_slack > 0;
  if (more > 0) {
    try {
      const uint64_t room = round_up(more * area_bytes, kRegionAlign);
      const uint64_t offset = store_.allocate_log(room);
      g.log_bytes = store_.geometry().log_bytes;
      place(g, {offset, room}, wanted, area_bytes);
      has_grown = true;
    } catch (const Error& error) {
      if (error.kind != ErrorKind::kFull || targets + from_slack == 0) throw;
      is_full_ = true;  // no reason to stop training: the horizon is shorter
    }
  }
  if (has_grown) store_.write_geometry(g);
}

// An area without a generation that a rewind could use, else the one whose generation leaves the
// smallest gap. Not the last one before the newest if that is of the same batch (a training that
// ends captures it again): it is then the second of the two that are always kept.
uint32_t DenseLog::choose_area(uint64_t batch, uint64_t bytes, const Horizon& horizon) const {
  std::vector<uint32_t> useful;
  for (uint32_t area = 0; area < kDenseAreas; ++area) {
    const bool is_newest = newest_ && newest_->area == area;
    const auto& h = held_[area];
    const bool is_useful =
        h && newest_ && h->batch >= horizon.oldest && h->batch < newest_->header.batch;
    if (!is_useful && is_target(area, bytes)) return area;
    if (is_useful || is_newest) useful.push_back(area);
  }
  std::sort(useful.begin(), useful.end(),
            [&](uint32_t a, uint32_t b) { return held_[a]->batch < held_[b]->batch; });
  uint32_t chosen = kDenseAreas;
  uint64_t smallest = ~0ull;
  const bool is_again = newest_ && newest_->header.batch == batch && useful.size() > 2;
  const size_t spared = is_again ? 2 : 1;  // the last one is the newest
  for (size_t i = 0; i + spared < useful.size(); ++i) {
    const uint64_t before = i == 0 ? horizon.oldest : held_[useful[i - 1]]->batch;
    const uint64_t gap = held_[useful[i + 1]]->batch - before;
    if (gap >= smallest || !is_target(useful[i], bytes)) continue;
    smallest = gap;
    chosen = useful[i];
  }
  if (chosen == kDenseAreas && is_again) chosen = useful[useful.size() - 2];
  TCXL_ASSERT(chosen < kDenseAreas && is_target(chosen, bytes));
  return chosen;
}

}  // namespace tcxl
