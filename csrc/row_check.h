// What `verify` finds in the rows of tables that carry checksums.
#pragma once

#include <vector>

#include "recovery.h"
#include "store.h"

namespace tcxl {

// Of a row that a batch in flight changes, what counts is what the undo log puts back.
void verify_rows(Store& store, std::vector<Damage>& found);

}  // namespace tcxl
