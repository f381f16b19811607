#include "row_history.h"

namespace tcxl {

void RowHistory::count(const Step& step, const std::vector<Table>& tables, BatchCounts& counts) {
  tables_.resize(tables.size());
  for (size_t t = 0; t < tables_.size(); ++t) {
    PerTable& past = tables_[t];
    const bool is_used = t < step.place.size() && step.place[t] != kNoRecord;
    if (!is_used) {
      past.before.clear();
      continue;
    }
    const TableLookups& lookups = step.tables[step.place[t]].lookups;
    const TableView& view = tables[t].view;
    const auto weight_bytes = static_cast<uint64_t>(view.dim) * sizeof(float);
    const auto state_bytes = static_cast<uint64_t>(view.state_floats()) * sizeof(float);
    counts.lookups += lookups.num_lookups();
    counts.rows += lookups.num_rows();
    counts.lookup_bytes += lookups.num_lookups() * weight_bytes;
    counts.row_bytes += lookups.num_rows() * (weight_bytes + state_bytes);
    past.changed.resize(view.rows);
    size_t b = 0;
    for (size_t r = 0; r < lookups.rows.size(); ++r) {
      const uint64_t row = lookups.rows[r];
      counts.first_rows += past.changed[row] ? 0 : 1;
      past.changed[row] = true;
      while (b < past.before.size() && past.before[b] < row) ++b;
      if (b == past.before.size() || past.before[b] != row) continue;
      ++counts.recurring_rows;
      counts.recurring_lookups += lookups.begin[r + 1] - lookups.begin[r];
    }
    past.before.assign(lookups.rows.begin(), lookups.rows.end());
  }
}

}  // namespace tcxl
