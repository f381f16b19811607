// One sort of a batch's lookups by row, for the undo log and for the update.
#include <algorithm>
#include <bit>

#include "kernels.h"

namespace tcxl {
namespace {

constexpr int kDigitBitsMax = 11;

using Wide = TableLookups::Wide;

uint64_t row_of(uint64_t packed) { return packed >> 32; }
uint64_t row_of(const Wide& wide) { return wide.row; }

// Digits of a radix sort of rows below `table_rows`.
struct Digits {
  int passes = 0;
  int bits = 0;
  explicit Digits(uint64_t table_rows) {
    const int row_bits = table_rows > 1 ? static_cast<int>(std::bit_width(table_rows - 1)) : 0;
    passes = (row_bits + kDigitBitsMax - 1) / kDigitBitsMax;
    if (passes > 0) bits = (row_bits + passes - 1) / passes;
  }
  uint64_t buckets() const { return uint64_t{1} << bits; }
  uint64_t digit(uint64_t row, int pass) const { return row >> (pass * bits) & (buckets() - 1); }
};

// Lookups of a batch in lookup order: emit(row, grad_offset, coefficient).
template <typename Emit>
void for_each_lookup(const FeatureBags* features, size_t num_features, int64_t num_bags, int64_t grad_stride,
                     const Emit& emit) {
  for (size_t f = 0; f < num_features; ++f) {
    const FeatureBags& bags = features[f];
    for (int64_t b = 0; b < num_bags; ++b) {
      const int64_t begin = bags.offsets[b], end = bags.offsets[b + 1];
      const auto grad_offset = static_cast<uint64_t>(b * grad_stride + bags.column);
      const float length = bags.pooling == Pooling::kMean ? static_cast<float>(end - begin) : 1.0f;
      for (int64_t i = begin; i < end; ++i) {
        const float weight = bags.weights != nullptr ? bags.weights[i] : 1.0f;
        emit(static_cast<uint64_t>(bags.ids[i]), grad_offset, weight / length);
      }
    }
  }
}

// Stable sort by row, least significant digit first. `counts` holds the histogram of every pass.
template <typename Entry>
void radix_sort(const Digits& digits, std::vector<uint32_t>& counts, std::vector<Entry>& entries,
                std::vector<Entry>& scratch) {
  scratch.resize(entries.size());
  for (int pass = 0; pass < digits.passes; ++pass) {
    uint32_t* next = counts.data() + static_cast<uint64_t>(pass) * digits.buckets();
    uint32_t sum = 0;
    for (uint64_t k = 0; k < digits.buckets(); ++k) {
      const uint32_t count = next[k];
      next[k] = sum;
      sum += count;
    }
    for (const Entry& entry : entries) scratch[next[digits.digit(row_of(entry), pass)]++] = entry;
    entries.swap(scratch);
  }
}

template <typename Entry>
void find_rows(const std::vector<Entry>& entries, std::vector<uint64_t>& rows, std::vector<uint64_t>& begin) {
  const uint64_t n = entries.size();
  uint64_t distinct = n > 0 ? 1 : 0;
  for (uint64_t i = 1; i < n; ++i) distinct += row_of(entries[i]) != row_of(entries[i - 1]);
  rows.resize(distinct);
  begin.resize(distinct + 1);
  uint64_t r = 0;
  for (uint64_t i = 0; i < n; ++i) {  // no branch: the last store to rows[r] and the first to begin[r] hold
    const bool is_first = i == 0 || row_of(entries[i]) != row_of(entries[i - 1]);
    r += is_first && i > 0;
    rows[r] = row_of(entries[i]);
    if (is_first) begin[r] = i;
  }
  begin[distinct] = n;
}

}  // namespace

void TableLookups::build(const FeatureBags* features, size_t num_features, int64_t num_bags, int64_t grad_stride,
                         uint64_t table_rows) {
  uint64_t num_lookups = 0;
  int64_t column_max = 0;
  is_wide = table_rows > uint64_t{1} << 32;
  for (size_t f = 0; f < num_features; ++f) {
    num_lookups += static_cast<uint64_t>(features[f].offsets[num_bags] - features[f].offsets[0]);
    column_max = std::max(column_max, features[f].column);
    is_wide |= features[f].weights != nullptr || features[f].pooling == Pooling::kMean;
  }
  const int64_t last_bag = std::max<int64_t>(num_bags - 1, 0);
  is_wide |= static_cast<uint64_t>(last_bag * grad_stride + column_max) >> 32 != 0;

  const Digits digits(table_rows);
  histogram_.assign(static_cast<uint64_t>(digits.passes) * digits.buckets(), 0);
  const auto count = [&](uint64_t row) {
    for (int pass = 0; pass < digits.passes; ++pass) {
      ++histogram_[static_cast<uint64_t>(pass) * digits.buckets() + digits.digit(row, pass)];
    }
  };
  uint64_t i = 0;
  if (is_wide) {
    wide.resize(num_lookups);
    for_each_lookup(features, num_features, num_bags, grad_stride, [&](uint64_t row, uint64_t offset, float factor) {
      count(row);
      wide[i++] = {row, offset, factor, 0};
    });
    radix_sort(digits, histogram_, wide, wide_scratch_);
    find_rows(wide, rows, begin);
  } else {
    packed.resize(num_lookups);
    for_each_lookup(features, num_features, num_bags, grad_stride, [&](uint64_t row, uint64_t offset, float) {
      count(row);
      packed[i++] = row << 32 | offset;
    });
    radix_sort(digits, histogram_, packed, packed_scratch_);
    find_rows(packed, rows, begin);
  }
}

void match_rows(const std::vector<uint64_t>& a, const std::vector<uint64_t>& b, std::vector<uint32_t>& index_in_b) {
  index_in_b.resize(a.size());
  uint64_t i = 0, j = 0;
  while (i < a.size() && j < b.size()) {
    const uint64_t row_a = a[i], row_b = b[j];
    index_in_b[i] = row_a == row_b ? static_cast<uint32_t>(j) : kNoRecord;
    i += row_a <= row_b;
    j += row_b <= row_a;
  }
  for (; i < a.size(); ++i) index_in_b[i] = kNoRecord;
}

}  // namespace tcxl
