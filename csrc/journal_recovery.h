// Recovery from the journal: what a power failure left of the tables becomes one batch again.
#pragma once

#include "journal_file.h"
#include "recovery.h"

namespace tcxl {

// As recover() (recovery.h), from the journal alone: of the log only the dense areas are believed,
// by their checksums. A function of the bytes; the journal is not changed, so that it can be
// repeated until the caller makes the result the journal's base.
RecoveryReport recover_from_journal(Store& store, UndoLog& undo, DenseLog& dense,
                                    const JournalFile& file, bool exact);

// Damage of the journal that `verify` reports.
// Newest batch that the journal itself says is durable; nullopt: it says nothing. Of a pool that is
// trained at the same time: one that was.
std::optional<uint64_t> newest_durable(const JournalFile& file);
void verify_journal(const Store& store, std::vector<Damage>& found);

}  // namespace tcxl
