// Going back some batches (docs/format.md, "Rewind"): to one that has a dense generation, by the
// undo frames that are kept as long as the log has room for them.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "dense_log.h"
#include "recovery.h"
#include "store.h"
#include "undo_log.h"

namespace tcxl {

struct RewindPoint {
  uint64_t batch = 0;
  std::optional<Generation> generation;  // none: the tables alone can be taken back to it
};

// Whether a generation is of the history that leads to the commit of life `life`: no life that
// began before its batch is later than its own. The entry of its batch in the directory says which
// life trained it last.
bool is_on_line(const UndoLog& undo, const layout::DenseHeader& header, uint64_t life);

// The newest valid generation of that history whose batch is `first` to `last`; of several of one
// batch that of the latest life.
std::optional<Generation> newest_on_line(const UndoLog& undo, const DenseLog& dense, uint64_t life,
                                         uint64_t first, uint64_t last);

// The batches before `batch`, the present one, that the undo log reaches; newest first. Checks
// every record on the way: reads all that the log keeps.
std::vector<RewindPoint> rewind_points(const Store& store, const UndoLog& undo,
                                       const DenseLog& dense, uint64_t batch);

// After a recovery to `batch`: keeps what older frames and generations a rewind can use.
void adopt_horizon(const Store& store, UndoLog& undo, DenseLog& dense, uint64_t batch);

// Makes the point's batch the committed one. The slot that names its generation decides: killed
// before it nothing has changed, killed after it the next recovery goes on. journal_life: the
// journal's, 0 without one.
RecoveryReport rewind(Store& store, UndoLog& undo, DenseLog& dense, const Generation& target,
                      uint64_t journal_life);

}  // namespace tcxl
