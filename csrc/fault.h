// Faults that the crash rig must find, one planted at a time. They exist in the rig's own build
// alone (cmake -DTCXL_FAULTS=ON); everywhere else has_fault() is false when compiled, and its
// places vanish. No standard headers: the kernels are built for several vector widths.
#pragma once

namespace tcxl {

enum class Fault : unsigned {
  kNone,
  // what P does
  kNoRecordFlush,
  kNoRecordFence,
  kNoFrameHeaderPersist,
  kNoFlagPersist,
  kNoFlagClearPersist,
  kNoRowFlush,
  kNoRowFence,
  kNoResumePersist,
  kNoSlotPersist,
  kNoDenseFlush,
  kNoDenseHeaderPersist,
  kNoGeometryPersist,
  kNoSuperblockOrder,
  kNoSizeSync,
  kNoFolderSync,
  kNoParentSync,
  // order and contents
  kStaleOverlap,
  kFlagBeforeRecords,
  kStaleFlagKept,
  kStrayStore,
  kSlotBeforeRows,
  kSlotByParity,
  kOneResumeArea,
  kDenseOverNewest,
  kReclaimEarly,
  kRelaxedReclaimEarly,
  kNoBatchAndLifeInCrc,
  kFusedTagBeforeRecords,
  kFusedRowsBeforeTag,
  // recovery
  kRecoveryWithoutEvidence,
  kRecoverySlotFirst,
  kRecoveryWithoutRowFlush,
  kRecoveryWithoutRollingBack,
  kRecoverySameLife,
  kRecoveryStaysClean,
  // rewind
  kRewindWithoutEvidence,
  kRewindRowsNotPersisted,
  kRewindNotGoneOnWith,
  kRewindCutsFirst,
  kDenseOverResumed,
  // journal: syncs
  kJournalNoSync,
  kJournalNoSlotSync,
  kJournalNoGrowSync,
  kJournalNoDenseSync,
  kJournalNoSessionSync,
  kJournalNoFolderSync,
  kJournalNoSuperblockSync,
  // journal: order and contents
  kJournalBitsKept,
  kJournalNoReannounce,
  kJournalNoPreviousWait,
  kJournalCutBeforeTables,
  kJournalCutBeforeDense,
  kJournalRingOverrun,
  kJournalReleaseFirst,
  kJournalDenseOverNeeded,
  kJournalDenseAhead,
  kJournalSharedSector,
  kJournalNoIdInCrc,
  kJournalNoLife,
  // journal: recovery
  kJournalRedoBeyondPoint,
  kJournalPreviousAlways,
  kJournalResetBeforeSync,
  kJournalDenseRewrittenEarly,
  // journal: rewind
  kJournalRewindEvidenceLate,
  kJournalRewindSlotLate,
  kJournalRewindResumeLate,
  kJournalRewindRowsLate,
  kJournalRewindIgnored,
  kCount,
};

#ifdef TCXL_FAULTS
namespace internal {
extern Fault planted_fault;
}
static inline bool has_fault(Fault fault) { return internal::planted_fault == fault; }
#else
static inline constexpr bool has_fault(Fault) { return false; }
#endif

}  // namespace tcxl
