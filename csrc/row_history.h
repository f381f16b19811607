// Which rows of a batch recur from the batch before, and which change for the first time. For a
// profile: a bit a row and the rows of one batch.
#pragma once

#include <cstdint>
#include <vector>

#include "step.h"
#include "trace.h"

namespace tcxl {

class RowHistory {
 public:
  // Counts the step's lookups, rows and bytes, its rows against those of the steps before it.
  void count(const Step& step, const std::vector<Table>& tables, BatchCounts& counts);

 private:
  struct PerTable {
    std::vector<uint64_t> before;  // rows of the newest batch, ascending
    std::vector<bool> changed;     // allocated for tables that change
  };
  std::vector<PerTable> tables_;
};

}  // namespace tcxl
