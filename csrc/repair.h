// Opening a pool that recovery refuses: at a batch that its sound parts still reach. Never does
// more than a rewind does; what is damaged is given up by name.
#pragma once

#include <cstdint>
#include <vector>

#include "dense_log.h"
#include "recovery.h"
#include "rewind.h"
#include "store.h"
#include "undo_log.h"

namespace tcxl {

struct RepairPoint {
  uint64_t batch = 0;
  Generation generation;  // of that batch, or an older one: then the rows go on with it ("latest")
};

// What is reachable, newest first; nothing when the tables' batch cannot be told. Reads all that
// the undo log keeps.
std::vector<RepairPoint> repair_points(const Store& store, const UndoLog& undo,
                                       const DenseLog& dense);

// Clears dense parts that nobody can read, so that `verify` finds no damage in them.
void clear_damaged(Store& store, const DenseLog& dense);

// Makes the point the committed batch, and clears what is damaged beyond use. Killed at any
// instant, it can be done again. journal_life: as in rewind().
RecoveryReport repair(Store& store, UndoLog& undo, DenseLog& dense, const RepairPoint& point,
                      uint64_t journal_life);

}  // namespace tcxl
