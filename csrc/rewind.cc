#include "rewind.h"

#include "crash_point.h"
#include "errors.h"
#include "fault.h"

namespace tcxl {

using namespace layout;

bool is_on_line(const UndoLog& undo, const DenseHeader& h, uint64_t life) {
  if (h.life > life) return false;
  if (h.batch == 0) return true;
  const auto trained = undo.find_on_line(h.batch, life);
  return trained && trained->life <= h.life;
}

std::optional<Generation> newest_on_line(const UndoLog& undo, const DenseLog& dense, uint64_t life,
                                         uint64_t first, uint64_t last) {
  std::optional<Generation> found;
  for (uint32_t area = 0; area < kDenseAreas; ++area) {
    Generation g;
    if (!dense.check_header(area, g).empty()) continue;
    const DenseHeader& h = g.header;
    if (h.batch < first || h.batch > last || !is_on_line(undo, h, life)) continue;
    const bool is_newer = !found || h.batch > found->header.batch ||
                          (h.batch == found->header.batch && h.life > found->header.life);
    if (is_newer && dense.check_area(area, g).empty()) found = g;
  }
  return found;
}

std::vector<RewindPoint> rewind_points(const Store& store, const UndoLog& undo,
                                       const DenseLog& dense, uint64_t batch) {
  std::vector<RewindPoint> points;
  if (!store.slot()) return points;
  uint64_t life = store.slot()->life;
  for (uint64_t n = batch; n > 0 && batch - n + 1 < kDirectoryEntries; --n) {
    const auto frame = undo.find_on_line(n, life);
    if (!frame || !undo.is_sound(*frame, true)) break;
    life = frame->life;
    points.push_back({n - 1, newest_on_line(undo, dense, store.slot()->life, n - 1, n - 1)});
  }
  return points;
}

void adopt_horizon(const Store& store, UndoLog& undo, DenseLog& dense, uint64_t batch) {
  const uint64_t life = store.max_life();
  undo.adopt(batch, life);
  for (uint32_t area = 0; area < kDenseAreas; ++area) {
    Generation g;
    if (!dense.check_header(area, g).empty() || g.header.batch > batch ||
        !is_on_line(undo, g.header, life))
      dense.forget(area);
  }
}

RecoveryReport rewind(Store& store, UndoLog& undo, DenseLog& dense, const Generation& target,
                      uint64_t journal_life) {
  const Slot slot = *store.slot();
  Slot begun = slot;
  begun.rolling_back = kRewinding;
  begun.journal_life = journal_life;
  name_generation(begun, target);
  // After a power failure the slot is believed although the machine restarted: what it needs must
  // be durable before it, and it before the first row that changes. Its own resume record, too: on
  // the medium without it the slot is not valid, the journal tells, and the recovery that follows
  // writes just such a record to just that place. So both places get it first.
  if (journal_life != 0 && !has_fault(Fault::kJournalRewindResumeLate))
    store.write_slot(slot, store.read_resume(slot));
  if (journal_life != 0 && !has_fault(Fault::kJournalRewindEvidenceLate)) store.sync_all();
  crash_point("rewind: decided");
  store.write_slot(begun, store.read_resume(slot));
  return recover(store, undo, dense, true);
}

}  // namespace tcxl
