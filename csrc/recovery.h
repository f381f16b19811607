// Recovery: a function of the bytes (protocol in docs/format.md, "Recovery"). Finds the recovery
// point, rolls the tables back to it, and makes it the committed batch. Running it again, or
// killing it half-way, changes nothing.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dense_log.h"
#include "store.h"
#include "undo_log.h"

namespace tcxl {

inline constexpr uint64_t kLookaheadMax =
    8;  // batches beyond the committed one that may have a flag

struct RecoveryReport {
  bool is_exact = true;          // "latest" goes on with an exact recovery that was killed
  bool is_rewind = false;        // a rewind that was killed was completed
  bool has_point = false;        // false: no batch was ever committed
  uint64_t committed_batch = 0;  // found in the newest slot
  uint64_t dense_batch = 0;      // newest complete dense generation
  uint64_t resumed_batch = 0;    // the recovery point
  uint64_t frames_undone = 0;
  uint64_t rows_rolled_back = 0;  // undo records applied
  uint64_t rows_changed = 0;      // of these, rows whose bytes differed from the record
  std::string resume;             // resume record of the recovery point
};

// exact: the newest complete dense generation; otherwise ("latest") the newest commit with that
// generation's dense part. On a read-only store everything happens in the private mapping.
RecoveryReport recover(Store& store, UndoLog& undo, DenseLog& dense, bool exact);

struct Damage {
  std::string region, where, what;
};
// Every checksum and invariant of a store, without changing it.
std::vector<Damage> verify(Store& store);

}  // namespace tcxl
