// Relaxed lookup: what a batch changed, added to bags that were pooled before it. Part of
// kernels_body.h.
#pragma once

#include "kernels_body_grad.h"

namespace tcxl {
namespace {

constexpr uint64_t kCorrectBlock = 64;  // rows prefetched, then used

// Rows that are both looked up and changed: their places in either list.
struct Recurring {
  uint64_t count = 0;
  uint32_t looked_up[kCorrectBlock];
  uint32_t changed[kCorrectBlock];
};

// Goes on with the merge of two ascending lists until the block is full or one of them ends.
TCXL_INLINE void find_recurring(const CorrectJob& job, const RowLookups& lookups, uint64_t& at,
                                uint64_t& changed, Recurring& found) {
  found.count = 0;
  while (at < lookups.num_rows && changed < job.num_changed && found.count < kCorrectBlock) {
    const uint64_t mine = lookups.rows[at], theirs = job.changed_rows[changed];
    found.looked_up[found.count] = static_cast<uint32_t>(at);
    found.changed[found.count] = static_cast<uint32_t>(changed);
    found.count += mine == theirs ? 1 : 0;
    at += mine <= theirs ? 1 : 0;
    changed += theirs <= mine ? 1 : 0;
  }
}

template <typename S, bool kWide>
void correct_columns(const CorrectJob& job, const RowLookups& lookups, const Recurring& rows,
                     int64_t column, int64_t columns) {
  const Tail tail(columns);
  const auto dim = static_cast<uint64_t>(job.table.dim);
  const auto first = static_cast<uint64_t>(column);
  for (uint64_t i = 0; i < rows.count; ++i) {
    const uint64_t r = rows.looked_up[i];
    typename S::RowType change;
    difference(change, job.table.weight + lookups.rows[r] * dim + first,
               job.before + rows.changed[i] * dim + first, tail);
    for (uint64_t k = lookups.begin[r]; k < lookups.begin[r + 1]; ++k) {
      float* out = job.out + grad_offset<kWide>(lookups, k) + first;
      if constexpr (kWide) {
        add_scaled_to(out, change, splat(lookups.wide[k].coefficient), tail);
      } else {
        add_to(out, change, tail);
      }
    }
  }
}

uint64_t correct_lookups_kernel(const CorrectJob& job, const RowLookups& lookups) {
  const int64_t dim = job.table.dim;
  uint64_t at = 0, changed = 0, corrected = 0;
  Recurring rows;
  do {
    find_recurring(job, lookups, at, changed, rows);
    for (uint64_t i = 0; i < rows.count; ++i) {
      const uint64_t r = rows.looked_up[i];
      prefetch_far(job.table.weight + lookups.rows[r] * static_cast<uint64_t>(dim), dim * 4);
      corrected += lookups.begin[r + 1] - lookups.begin[r];
    }
    for (int64_t column = 0; column < dim; column += kGroupsMax * kGroup) {
      const int64_t left = dim - column;
      const int64_t columns = left < kGroupsMax * kGroup ? left : kGroupsMax * kGroup;
      with_shape(columns, [&](auto shape) {
        using S = decltype(shape);
        if (lookups.wide == nullptr) {
          correct_columns<S, false>(job, lookups, rows, column, columns);
        } else {
          correct_columns<S, true>(job, lookups, rows, column, columns);
        }
      });
    }
  } while (rows.count == kCorrectBlock);
  return corrected;
}

}  // namespace
}  // namespace tcxl
