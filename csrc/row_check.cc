#include "row_check.h"

#include <unordered_map>

#include "errors.h"
#include "kernels.h"
#include "undo_log.h"

namespace tcxl {

namespace {

constexpr uint64_t kShown = 8;  // rows named, a table

// By table: rows that opening the pool would put back, and whether what it puts there is whole.
using Rows = std::unordered_map<uint64_t, bool>;

std::vector<Rows> rows_in_flight(Store& store) {
  std::vector<Rows> rows(store.tables().size());
  if (!store.slot()) return rows;
  UndoLog undo(store);
  undo.attach();
  const uint64_t life = store.slot()->life;
  for (uint64_t n = store.slot()->batch + 1;; ++n) {
    const auto descriptor = undo.find(n, life);
    if (!descriptor) return rows;
    undo.visit_rows(*descriptor,
                    [&](uint64_t t, uint64_t row, const float* state, const float* weight) {
                      const TableView& view = store.tables()[t].view;
                      if (view.has_check)
                        rows[t].try_emplace(row, is_row_whole(view, row, state, weight));
                    });
  }
}

void verify_table(const Table& table, const Rows& in_flight, std::vector<Damage>& found) {
  uint64_t damaged = 0;
  auto add = [&](uint64_t row) {
    if (++damaged <= kShown)
      found.push_back({"table", text("table '", table.name, "', row ", row), "wrong checksum"});
  };
  for (uint64_t row = 0; row < table.view.rows; ++row) {
    row = find_damaged_row(table.view, row, table.view.rows);
    if (row < table.view.rows && !in_flight.contains(row)) add(row);
  }
  for (const auto& [row, is_whole] : in_flight) {
    if (!is_whole) add(row);
  }
  if (damaged > kShown)
    found.push_back({"table", text("table '", table.name, "'"),
                     text(damaged, " rows have a wrong checksum, ", kShown, " are named")});
}

}  // namespace

void verify_rows(Store& store, std::vector<Damage>& found) {
  // The machine restarted while the pool was open: the journal holds what the rows should be.
  if (store.needs_journal()) return;
  std::vector<Rows> in_flight;
  try {
    in_flight = rows_in_flight(store);
  } catch (const Error&) {
    return;  // the undo log is damaged, which is reported
  }
  for (size_t t = 0; t < store.tables().size(); ++t) {
    if (store.tables()[t].view.has_check) verify_table(store.tables()[t], in_flight[t], found);
  }
}

}  // namespace tcxl
