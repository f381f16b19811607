// The sort of a batch's lookups, and the match of two batches' rows.
#include <algorithm>
#include <map>

#include "check.h"
#include "kernels.h"
#include "kernels_reference.h"

namespace {

using namespace tcxl;
using namespace tcxl::test;

struct Lookup {
  uint64_t row, grad_offset;
  float coefficient;
  bool operator==(const Lookup&) const = default;
};

std::vector<Lookup> sorted(const TableLookups& lookups) {
  std::vector<Lookup> out;
  for (const uint64_t x : lookups.packed) {
    if (!lookups.is_wide) out.push_back({x >> 32, x & 0xffffffffu, 1.0f});
  }
  for (const TableLookups::Wide& x : lookups.wide) {
    if (lookups.is_wide) out.push_back({x.row, x.grad_offset, x.coefficient});
  }
  return out;
}

std::vector<Lookup> expected_order(const std::vector<Feature>& features, int64_t num_bags,
                                   int64_t stride) {
  std::vector<Lookup> out;
  for (const Feature& f : features) {
    for (int64_t b = 0; b < num_bags; ++b) {
      const auto begin = static_cast<size_t>(f.offsets[static_cast<size_t>(b)]);
      const auto end = static_cast<size_t>(f.offsets[static_cast<size_t>(b) + 1]);
      for (size_t i = begin; i < end; ++i) {
        float factor = f.weights.empty() ? 1.0f : f.weights[i];
        if (f.pooling == Pooling::kMean) factor /= static_cast<float>(end - begin);
        out.push_back({static_cast<uint64_t>(f.ids[i]),
                       static_cast<uint64_t>(b * stride + f.column), factor});
      }
    }
  }
  std::stable_sort(out.begin(), out.end(),
                   [](const Lookup& a, const Lookup& b) { return a.row < b.row; });
  return out;
}

void check_build(TableLookups& lookups, const std::vector<Feature>& features, int64_t num_bags,
                 int64_t stride, uint64_t table_rows, bool is_wide) {
  std::vector<FeatureBags> bags;
  for (const Feature& feature : features) bags.push_back(feature.bags());
  lookups.build(bags.data(), bags.size(), num_bags, stride, table_rows);
  const std::string name = std::to_string(table_rows) + " rows";
  const std::vector<Lookup> expected = expected_order(features, num_bags, stride);
  CHECK_EQUAL(lookups.is_wide, is_wide);
  CHECK_EQUAL(lookups.num_lookups(), expected.size());
  CHECK_CASE(sorted(lookups) == expected, name);
  std::vector<uint64_t> rows, begin;
  for (uint64_t i = 0; i < expected.size(); ++i) {
    if (i > 0 && expected[i].row == expected[i - 1].row) continue;
    rows.push_back(expected[i].row);
    begin.push_back(i);
  }
  begin.push_back(expected.size());
  CHECK_CASE(lookups.rows == rows, name);
  CHECK_CASE(lookups.begin == begin, name);
}

// One object for all sizes: what a use leaves in the buffers must not leak into the next.
void sorts_tables_of_every_size() {
  Random random{11};
  TableLookups lookups;
  constexpr uint64_t kTableRows[] = {1,
                                     2,
                                     3,
                                     4,
                                     5,
                                     16,
                                     17,
                                     100,
                                     255,
                                     256,
                                     257,
                                     1000,
                                     2048,
                                     2049,
                                     4097,
                                     65536,
                                     65537,
                                     1000000,
                                     5000000,
                                     uint64_t{1} << 31,
                                     uint64_t{1} << 32};
  for (const uint64_t table_rows : kTableRows) {
    for (const int64_t num_bags : {0, 1, 2, 3, 64, 600}) {
      const int64_t long_bag = random.below(3000);
      std::vector<Feature> features{
          random_feature(table_rows, num_bags, long_bag, Pooling::kSum, false, 3, random),
          random_feature(table_rows, num_bags, 2, Pooling::kSum, false, 35, random)};
      check_build(lookups, features, num_bags, 77, table_rows, false);
      features[1] = random_feature(table_rows, num_bags, 20, Pooling::kMean, false, 35, random);
      check_build(lookups, features, num_bags, 77, table_rows, true);
      features[1] = random_feature(table_rows, num_bags, 20, Pooling::kSum, true, 35, random);
      check_build(lookups, features, num_bags, 77, table_rows, !features[1].weights.empty());
    }
  }
}

// Long enough to be sorted in parts: spread evenly, and all on few rows.
void sorts_long_batches() {
  Random random{16};
  TableLookups lookups;
  for (const int64_t table_rows : {3, 300, 3000, 100000, 1000000, 100000000}) {
    for (const int64_t spread : {table_rows, (table_rows + 9) / 10, int64_t{1}}) {
      Feature feature;
      feature.offsets.push_back(0);
      for (int64_t b = 0; b < 100; ++b) {
        for (int64_t i = 0; i < 900; ++i) {
          feature.ids.push_back(table_rows - 1 - random.below(spread));
        }
        feature.offsets.push_back(static_cast<int64_t>(feature.ids.size()));
      }
      check_build(lookups, {feature}, 100, 64, static_cast<uint64_t>(table_rows), false);
    }
  }
}

void is_wide_when_32_bits_do_not_do() {
  Random random{12};
  TableLookups lookups;
  const uint64_t many = (uint64_t{1} << 32) + 1;
  std::vector<Feature> features{random_feature(many, 50, 500, Pooling::kSum, false, 0, random)};
  features[0].ids[0] = static_cast<int64_t>(many - 1);
  check_build(lookups, features, 50, 64, many, true);
  features = {random_feature(uint64_t{1} << 40, 50, 500, Pooling::kSum, false, 0, random)};
  check_build(lookups, features, 50, 64, uint64_t{1} << 40, true);
  features = {random_feature(100, 3, 50, Pooling::kSum, false, 0, random)};
  check_build(lookups, features, 3, int64_t{1} << 31, 100, true);  // last bag starts at 2^32
  check_build(lookups, features, 3, (int64_t{1} << 31) - 1, 100, false);
}

// A slice of the lookups of a larger batch: offsets need not start at 0.
void takes_offsets_that_start_anywhere() {
  Random random{13};
  Feature feature = random_feature(1000, 40, 300, Pooling::kSum, false, 8, random);
  feature.offsets.erase(feature.offsets.begin(), feature.offsets.begin() + 10);
  TableLookups lookups;
  check_build(lookups, {feature}, 30, 100, 1000, false);
}

void does_not_allocate_again() {
  Random random{14};
  TableLookups lookups;
  const std::vector<Feature> large{
      random_feature(100000, 64, 2500, Pooling::kSum, false, 0, random)};
  const std::vector<Feature> small{
      random_feature(100000, 64, 100, Pooling::kSum, false, 0, random)};
  check_build(lookups, large, 64, 16, 100000, false);
  check_build(lookups, large, 64, 16, 100000, false);
  const uint64_t* rows = lookups.rows.data();
  const uint64_t* begin = lookups.begin.data();
  const size_t capacity = lookups.packed.capacity();
  for (int i = 0; i < 4; ++i)
    check_build(lookups, i % 2 == 0 ? small : large, 64, 16, 100000, false);
  CHECK(lookups.rows.data() == rows && lookups.begin.data() == begin &&
        lookups.packed.capacity() == capacity);
}

void matches_rows() {
  Random random{15};
  for (const int64_t size : {0, 1, 2, 3, 7, 40, 3000}) {
    for (const int64_t size_b : {0, 1, 5, 2000}) {
      std::vector<uint64_t> a, b;
      for (int64_t i = 0; i < size; ++i)
        a.push_back(static_cast<uint64_t>(random.below(5000)) << 20);
      for (int64_t i = 0; i < size_b; ++i)
        b.push_back(static_cast<uint64_t>(random.below(5000)) << 20);
      for (std::vector<uint64_t>* v : {&a, &b}) {
        std::sort(v->begin(), v->end());
        v->erase(std::unique(v->begin(), v->end()), v->end());
      }
      std::map<uint64_t, uint32_t> place;
      for (uint32_t i = 0; i < b.size(); ++i) place[b[i]] = i;
      std::vector<uint32_t> expected, found(3, 7);
      for (const uint64_t row : a) expected.push_back(place.contains(row) ? place[row] : kNoRecord);
      match_rows(a, b, found);
      CHECK(found == expected);
    }
  }
}

}  // namespace

int main() {
  sorts_tables_of_every_size();
  sorts_long_batches();
  is_wide_when_32_bits_do_not_do();
  takes_offsets_that_start_anywhere();
  does_not_allocate_again();
  matches_rows();
  return check_result();
}
