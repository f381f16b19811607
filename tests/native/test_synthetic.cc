// The built-in data set: no out-of-range ids, the same bits for every way of cutting a batch and
// from several threads at once. That the bits are the recorded ones is tested from Python
// (test_data_synthetic.py).
#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

#include "check.h"
#include "synthetic.h"

namespace {

using namespace tcxl;

SyntheticSpec small_spec(double rho) {
  SyntheticSpec spec{7, -1.5, rho, 100, 16, {}, {}, {}};
  spec.dense = {{0.4, 1.2, 1.2, 0.0, 0.3}, {0.0, 1.5, 1.5, -1.0, -0.8}};
  // span and inverse of exponent 1.5 over 1000 rows, of exponent 1 over 37, of 0.5 over 2^31 - 1.
  spec.fields = {{1000, 1.0 / 31.638584039112748 - 1.0, -2.0, 7, 3, 1},
                 {37, 3.6375861597263857, 0.0, 5, 36, 3},
                 {(std::int64_t{1} << 31) - 1, 46339.95, 2.0, 1103515245, 12345, 1}};
  spec.pairs = {{0, 1}, {2, 0}};
  return spec;
}

struct Output {
  std::vector<float> dense, label;
  std::vector<std::int64_t> ids;
  std::vector<double> score;
  bool operator==(const Output&) const = default;
};

Output compute(const SyntheticSpec& spec, std::int64_t count, std::int64_t step) {
  const auto lookups = static_cast<std::size_t>(synthetic_lookups(spec));
  const auto total = static_cast<std::size_t>(count);
  Output out{std::vector<float>(total * spec.dense.size()), std::vector<float>(total),
             std::vector<std::int64_t>(total * lookups), std::vector<double>(total)};
  std::vector<std::int64_t> samples(total);
  for (std::size_t i = 0; i < total; ++i) samples[i] = static_cast<std::int64_t>(i * i);
  for (std::int64_t start = 0; start < count; start += step) {
    const auto at = static_cast<std::size_t>(start);
    synthetic_batch(spec, samples.data() + at, std::min(step, count - start),
                    {out.dense.data() + at * spec.dense.size(), out.ids.data() + at * lookups,
                     out.label.data() + at, out.score.data() + at});
  }
  return out;
}

void test_every_cut_gives_the_same() {
  for (const double rho : {0.0, 0.5}) {
    const SyntheticSpec spec = small_spec(rho);
    const Output whole = compute(spec, 1000, 1000);
    for (const std::int64_t step : {1, 7, 256, 257}) CHECK(compute(spec, 1000, step) == whole);
    std::vector<Output> outputs(3);
    std::vector<std::thread> threads;
    for (Output& out : outputs) threads.emplace_back([&] { out = compute(spec, 1000, 1000); });
    for (std::thread& thread : threads) thread.join();
    for (const Output& out : outputs) CHECK(out == whole);
  }
}

void test_ids_are_in_range() {
  const SyntheticSpec spec = small_spec(0.2);
  const Output out = compute(spec, 5000, 5000);
  const std::int64_t rows[] = {1000, 37, 37, 37, (std::int64_t{1} << 31) - 1};
  float clicks = 0;
  for (std::size_t i = 0; i < 5000; ++i) {
    for (std::size_t j = 0; j < 5; ++j) {
      if (!CHECK(out.ids[i * 5 + j] >= 0 && out.ids[i * 5 + j] < rows[j])) return;
    }
    clicks += out.label[i];
  }
  CHECK(clicks > 500 && clicks < 4500);
}

void test_wrong_specs_are_refused() {
  CHECK(synthetic_check(small_spec(0.0)) == nullptr);
  SyntheticSpec spec = small_spec(0.0);
  spec.fields[0].cardinality = 0;
  CHECK(synthetic_check(spec) != nullptr);
  spec = small_spec(0.0);
  spec.fields[2].cardinality = std::int64_t{1} << 31;
  CHECK(synthetic_check(spec) != nullptr);
  spec = small_spec(0.0);
  spec.pairs.push_back({0, 3});
  CHECK(synthetic_check(spec) != nullptr);
  spec = small_spec(0.0);
  spec.block_ids = 0;
  CHECK(synthetic_check(spec) != nullptr);
  spec = small_spec(0.0);
  spec.fields.clear();
  CHECK(synthetic_check(spec) != nullptr);
}

}  // namespace

int main() {
  test_every_cut_gives_the_same();
  test_ids_are_in_range();
  test_wrong_specs_are_refused();
  return tcxl::test::check_result();
}
