#include "repair.h"

#include <cstring>

#include "crash_point.h"
#include "errors.h"

namespace tcxl {

using namespace layout;

namespace {

// Rows of batches that were flagged and never committed can be put back.
bool has_sound_flags(const UndoLog& undo, const Slot& slot) {
  for (uint64_t n = slot.batch + 1; n <= slot.batch + kLookaheadMax; ++n) {
    const auto d = undo.find(n, slot.life);
    if (!d) return true;
    if (!undo.is_sound(*d, false)) return false;
  }
  return true;
}

}  // namespace

void clear_damaged(Store& store, const DenseLog& dense) {
  for (uint32_t area = 0; area < kDenseAreas; ++area) {
    Generation g;
    const std::string reason = dense.check_area(area, g);
    if (reason.empty() || reason == "no area" || reason == "empty") continue;
    std::byte* header = store.log().base() + store.geometry().dense_offset[area];
    std::memset(header, 0, sizeof(DenseHeader));
    store.persistence().persist(header, sizeof(DenseHeader));
  }
}

std::vector<RepairPoint> repair_points(const Store& store, const UndoLog& undo,
                                       const DenseLog& dense) {
  std::vector<RepairPoint> points;
  if (!store.slot()) return points;
  const Slot& slot = *store.slot();
  if (undo.has_later_flag(slot.life) || !has_sound_flags(undo, slot)) return points;
  const auto newest = newest_on_line(undo, dense, slot.life, 0, slot.batch);
  // Once batches are being taken back the rows are of no one batch but through their frames.
  if (newest && slot.rolling_back == 0) points.push_back({slot.batch, *newest});
  for (const RewindPoint& point : rewind_points(store, undo, dense, slot.batch)) {
    if (point.generation) points.push_back({point.batch, *point.generation});
  }
  return points;
}

RecoveryReport repair(Store& store, UndoLog& undo, DenseLog& dense, const RepairPoint& point,
                      uint64_t journal_life) {
  const Slot slot = *store.slot();
  RecoveryReport report;
  if (point.batch < slot.batch) {
    report = rewind(store, undo, dense, point.generation, journal_life);
  } else {
    Slot begun = slot;  // names the generation that is sound: the one it named is not missed
    name_generation(begun, point.generation);
    store.write_slot(begun, store.read_resume(slot));
    crash_point("repair: named");
    report = recover(store, undo, dense, false);
  }
  clear_damaged(store, dense);
  store.sync_all();
  return report;
}

}  // namespace tcxl
