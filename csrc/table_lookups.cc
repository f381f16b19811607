// One sort of a batch's lookups by row, for the undo log and for the update.
#include <algorithm>
#include <bit>

#include "kernels.h"
#include "kernels_internal.h"

namespace tcxl {
namespace {

using Wide = TableLookups::Wide;
using internal::SortPlan;

constexpr uint64_t kLowBits = 0xffffffffu;

// Sorting passes per thread and not per table: what one table leaves in the cache serves the next.
struct Scratch {
  std::vector<uint64_t> keys, spare, part;
  std::vector<Wide> wide;
  std::vector<uint32_t> counts;
};
thread_local Scratch scratch;

template <typename T>
void grow(std::vector<T>& buffer, uint64_t size) {
  if (buffer.size() < size) buffer.resize(size);
}

SortPlan plan_sort(uint64_t n, uint64_t table_rows) {
  constexpr int kDigitBitsMax = 11;     // of a short input
  constexpr int kFewBitsMax = 8;        // at most this many: sort_few_rows
  constexpr uint64_t kShortMax = 8192;  // keys that are sorted in one go
  constexpr uint64_t kPartKeys =
      4096;  // keys of a part: two arrays of them fit the first-level cache
  constexpr int kPartDigitBitsMax = 8;
  const int row_bits = table_rows > 1 ? static_cast<int>(std::bit_width(table_rows - 1)) : 0;
  SortPlan plan;
  if (row_bits == 0) return plan;
  int rest = row_bits, digit_max = kDigitBitsMax;
  if (row_bits > kDigitBitsMax && n > kShortMax) {
    rest = row_bits - std::min(static_cast<int>(std::bit_width(n / kPartKeys)), kPartDigitBitsMax);
    digit_max = kPartDigitBitsMax;
  }
  plan.passes = (rest + digit_max - 1) / digit_max;
  plan.bits = (rest + plan.passes - 1) / plan.passes;
  plan.leading_bits = std::max(0, row_bits - plan.passes * plan.bits);
  plan.is_few_rows = row_bits <= kFewBitsMax;
  plan.starts_in_spare = plan.leading_bits == 0 && plan.passes % 2 == 1;
  plan.num_counts =
      (uint64_t{1} << plan.leading_bits) +
      static_cast<uint64_t>(plan.is_few_rows ? 4 : plan.passes) * (uint64_t{1} << plan.bits);
  return plan;
}

// Calls fill(keys) to write `n` keys where the sort wants them, then sorts them into `sorted`.
template <typename Fill>
void sort_keys(uint64_t n, uint64_t table_rows, std::vector<uint64_t>& sorted, const Fill& fill) {
  const SortPlan plan = plan_sort(n, table_rows);
  sorted.resize(n);
  grow(scratch.spare, n);
  if (plan.leading_bits > 0) grow(scratch.part, n);
  grow(scratch.counts, plan.num_counts);
  fill(plan.starts_in_spare ? scratch.spare.data() : sorted.data());
  internal::current_kernels().sort_keys(plan, sorted.data(), scratch.spare.data(),
                                        scratch.part.data(), n, scratch.counts.data());
}

void find_rows(const std::vector<uint64_t>& keys, std::vector<uint64_t>& rows,
               std::vector<uint64_t>& begin) {
  const internal::KernelTable& kernels = internal::current_kernels();
  const uint64_t count = kernels.count_rows(keys.data(), keys.size());
  rows.resize(count);
  begin.resize(count + 1);
  kernels.find_rows(keys.data(), keys.size(), count, rows.data(), begin.data());
  begin[count] = keys.size();
}

void find_wide_rows(const std::vector<Wide>& wide, std::vector<uint64_t>& rows,
                    std::vector<uint64_t>& begin) {
  rows.clear();
  begin.clear();
  for (uint64_t i = 0; i < wide.size(); ++i) {
    if (i > 0 && wide[i].row == wide[i - 1].row) continue;
    rows.push_back(wide[i].row);
    begin.push_back(i);
  }
  begin.push_back(wide.size());
}

// Packed keys in lookup order: row << 32 | grad_offset.
void fill_packed(const FeatureBags* features, size_t num_features, int64_t num_bags,
                 int64_t grad_stride, uint64_t* keys) {
  for (size_t f = 0; f < num_features; ++f) {
    const FeatureBags& bags = features[f];
    const int64_t* ids = bags.ids + bags.offsets[0];
    auto offset = static_cast<uint64_t>(bags.column);
    for (int64_t b = 0; b < num_bags; ++b, offset += static_cast<uint64_t>(grad_stride)) {
      int64_t left = bags.offsets[b + 1] - bags.offsets[b];
      for (; left >= 4; left -= 4, ids += 4, keys += 4) {
        for (int k = 0; k < 4; ++k) keys[k] = static_cast<uint64_t>(ids[k]) << 32 | offset;
      }
      for (; left > 0; --left) *keys++ = static_cast<uint64_t>(*ids++) << 32 | offset;
    }
  }
}

void fill_wide(const FeatureBags* features, size_t num_features, int64_t num_bags,
               int64_t grad_stride, Wide* wide) {
  for (size_t f = 0; f < num_features; ++f) {
    const FeatureBags& bags = features[f];
    for (int64_t b = 0; b < num_bags; ++b) {
      const int64_t begin = bags.offsets[b], end = bags.offsets[b + 1];
      const auto grad_offset = static_cast<uint64_t>(b * grad_stride + bags.column);
      const float length = bags.pooling == Pooling::kMean ? static_cast<float>(end - begin) : 1.0f;
      for (int64_t i = begin; i < end; ++i) {
        const float weight = bags.weights != nullptr ? bags.weights[i] : 1.0f;
        *wide++ = {static_cast<uint64_t>(bags.ids[i]), grad_offset, weight / length, 0};
      }
    }
  }
}

// Sorts scratch.wide[0 .. n) into `wide` by sorting (row, place) keys: moving keys is cheaper. Rows
// of more than 32 bits take two sorts, which are stable: first by the low bits, then by the high
// ones.
void sort_wide(uint64_t n, uint64_t table_rows, std::vector<Wide>& wide) {
  const Wide* unsorted = scratch.wide.data();
  std::vector<uint64_t>& keys = scratch.keys;
  sort_keys(n, std::min(table_rows, kLowBits + 1), keys, [&](uint64_t* out) {
    for (uint64_t i = 0; i < n; ++i) out[i] = unsorted[i].row << 32 | i;
  });
  wide.resize(n);
  for (uint64_t i = 0; i < n; ++i) wide[i] = unsorted[keys[i] & kLowBits];
  if (table_rows <= kLowBits + 1) return;
  std::copy(wide.begin(), wide.end(), scratch.wide.begin());
  sort_keys(n, ((table_rows - 1) >> 32) + 1, keys, [&](uint64_t* out) {
    for (uint64_t i = 0; i < n; ++i) out[i] = (unsorted[i].row & ~kLowBits) | i;
  });
  for (uint64_t i = 0; i < n; ++i) wide[i] = unsorted[keys[i] & kLowBits];
}

}  // namespace

void TableLookups::build(const FeatureBags* features, size_t num_features, int64_t num_bags,
                         int64_t grad_stride, uint64_t table_rows) {
  uint64_t n = 0;
  int64_t column_max = 0;
  is_wide = table_rows > kLowBits + 1;
  for (size_t f = 0; f < num_features; ++f) {
    n += static_cast<uint64_t>(features[f].offsets[num_bags] - features[f].offsets[0]);
    column_max = std::max(column_max, features[f].column);
    is_wide |= features[f].weights != nullptr || features[f].pooling == Pooling::kMean;
  }
  const int64_t last_bag = std::max<int64_t>(num_bags - 1, 0);
  is_wide |= static_cast<uint64_t>(last_bag * grad_stride + column_max) > kLowBits;
  if (!is_wide) {
    sort_keys(n, table_rows, packed, [&](uint64_t* keys) {
      fill_packed(features, num_features, num_bags, grad_stride, keys);
    });
    find_rows(packed, rows, begin);
    return;
  }
  grow(scratch.wide, n);
  fill_wide(features, num_features, num_bags, grad_stride, scratch.wide.data());
  sort_wide(n, table_rows, wide);
  if (table_rows <= kLowBits + 1) {
    find_rows(scratch.keys, rows, begin);
  } else {
    find_wide_rows(wide, rows, begin);
  }
}

// Two ascending lists are walked like in a merge, without branches. Each step waits for the loads
// of the one before, so four pieces of `a` are walked side by side, each against the piece of `b`
// that may hold its rows.
void match_rows(const std::vector<uint64_t>& a, const std::vector<uint64_t>& b,
                std::vector<uint32_t>& index_in_b) {
  constexpr size_t kWalks = 4;
  struct Walk {
    uint64_t i, j, end_i, end_j;
  };
  index_in_b.assign(a.size(), kNoRecord);
  Walk walks[kWalks];
  for (size_t k = 0; k < kWalks; ++k) {
    const uint64_t first = a.size() * k / kWalks, end = a.size() * (k + 1) / kWalks;
    const auto begin_b = first < end ? std::lower_bound(b.begin(), b.end(), a[first]) : b.end();
    const auto end_b = first < end ? std::upper_bound(begin_b, b.end(), a[end - 1]) : b.end();
    walks[k] = {first, static_cast<uint64_t>(begin_b - b.begin()), end,
                static_cast<uint64_t>(end_b - b.begin())};
  }
  const auto step = [&](Walk& walk) {
    const uint64_t row_a = a[walk.i], row_b = b[walk.j];
    index_in_b[walk.i] = row_a == row_b ? static_cast<uint32_t>(walk.j) : kNoRecord;
    walk.i += row_a <= row_b;
    walk.j += row_b <= row_a;
  };
  const auto steps_left =
      [](const Walk& walk) {  // at least so many can be taken without a look at the ends
        return std::min(walk.end_i - walk.i, walk.end_j - walk.j);
      };
  Walk &w0 = walks[0], &w1 = walks[1], &w2 = walks[2], &w3 = walks[3];
  while (true) {
    const uint64_t safe = std::min(std::min(steps_left(w0), steps_left(w1)),
                                   std::min(steps_left(w2), steps_left(w3)));
    if (safe == 0) break;
    for (uint64_t k = 0; k < safe; ++k) {
      step(w0);
      step(w1);
      step(w2);
      step(w3);
    }
  }
  for (Walk& walk : walks) {
    while (walk.i < walk.end_i && walk.j < walk.end_j) step(walk);
  }
}

}  // namespace tcxl
