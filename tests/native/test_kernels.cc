// The kernels against plain loops (kernels_reference.h), bit for bit, for every vector width of
// this CPU and for any split of the ranges.
#include <cstring>
#include <limits>
#include <numeric>

#include "check.h"
#include "crc32c.h"
#include "kernels.h"
#include "kernels_reference.h"

namespace {

using namespace tcxl;
using namespace tcxl::test;

constexpr int64_t kDims[] = {1,  2,  3,  4,   7,   8,   12,  16,   17,  31,
                             32, 48, 64, 100, 128, 129, 256, 1000, 1024};
constexpr OptimizerKind kOptimizers[] = {OptimizerKind::kSgd, OptimizerKind::kAdagrad,
                                         OptimizerKind::kRowWiseAdagrad};
enum class Mode { kSum, kMean, kWeighted, kWeightedMean };
constexpr Mode kModes[] = {Mode::kSum, Mode::kMean, Mode::kWeighted, Mode::kWeightedMean};
constexpr size_t kBags = 24;
constexpr uint64_t kRows = 301;

std::vector<Isa> isas() {
  std::vector<Isa> found;
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    if (use_isa(isa)) found.push_back(isa);
  }
  return found;
}

// Two features that share a table, the second with bags of its own; a third that never looks
// anything up.
struct Batch {
  std::vector<Feature> features;
  int64_t stride;
  Floats grad;
  Batch(int64_t dim, Mode mode, Random& random)
      : stride(3 * dim + 5), grad(kBags * static_cast<size_t>(stride)) {
    const bool weighted = mode == Mode::kWeighted || mode == Mode::kWeightedMean;
    const Pooling pooling =
        mode == Mode::kMean || mode == Mode::kWeightedMean ? Pooling::kMean : Pooling::kSum;
    features.push_back(random_feature(kRows, kBags, 3000, pooling, weighted, 2, random));
    features.push_back(random_feature(kRows, kBags, 40, pooling, weighted, dim + 3, random));
    features.push_back({{}, std::vector<int64_t>(kBags + 1, 0), {}, Pooling::kSum, 2 * dim + 3});
    for (size_t i = 0; i < grad.size(); ++i) grad[i] = random.uniform();
  }
  void build(TableLookups& lookups, uint64_t table_rows = kRows) const {
    std::vector<FeatureBags> bags;
    for (const Feature& feature : features) bags.push_back(feature.bags());
    lookups.build(bags.data(), bags.size(), kBags, stride, table_rows);
  }
};

std::string name(int64_t dim, Isa isa) {
  return "dim " + std::to_string(dim) + ", " + isa_name(isa);
}

bool same(const Floats& a, const Floats& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void lookup_gives_reference_bits(const std::vector<Isa>& all) {
  for (const int64_t dim : kDims) {
    for (const Mode mode : kModes) {
      Random random{static_cast<uint64_t>(dim) * 7 + static_cast<uint64_t>(mode) + 1};
      const Table table(kRows, dim, OptimizerKind::kSgd, random);
      const Batch batch(dim, mode, random);
      Floats expected(batch.grad.size(), -5);
      for (const Feature& feature : batch.features) {
        for (size_t b = 0; b < kBags; ++b) {
          lookup_reference(table.view, feature, b,
                           expected.data() + static_cast<int64_t>(b) * batch.stride);
        }
      }
      for (const Isa isa : all) {
        use_isa(isa);
        for (const int64_t split : {int64_t{0}, int64_t{1}, int64_t{13}}) {
          Floats out(batch.grad.size(), -5);
          for (const Feature& feature : batch.features) {
            lookup(table.view, feature.bags(), 0, split, out.data(), batch.stride);
            lookup(table.view, feature.bags(), split, kBags, out.data(), batch.stride);
          }
          CHECK_CASE(same(out, expected), name(dim, isa));
        }
      }
    }
  }
}

// The reference itself, once, against sums in double.
void reference_is_close_to_double() {
  Random random{5};
  const Table table(kRows, 32, OptimizerKind::kSgd, random);
  const Batch batch(32, Mode::kWeighted, random);
  const Feature& f = batch.features[0];
  for (size_t b = 0; b < kBags; ++b) {
    float out[40];
    lookup_reference(table.view, f, b, out);
    for (int64_t d = 0; d < 32; ++d) {
      double sum = 0, size = 0;
      for (auto i = static_cast<size_t>(f.offsets[b]); i < static_cast<size_t>(f.offsets[b + 1]);
           ++i) {
        const double term =
            static_cast<double>(f.weights[i]) *
            static_cast<double>(table.weight[static_cast<size_t>(f.ids[i] * 32 + d)]);
        sum += term;
        size += std::fabs(term);
      }
      CHECK(std::fabs(sum - static_cast<double>(out[f.column + d])) <= 1e-5 * size);
    }
  }
}

void weight_grad_gives_reference_bits(const std::vector<Isa>& all) {
  for (const int64_t dim : kDims) {
    for (const Pooling pooling : {Pooling::kSum, Pooling::kMean}) {
      Random random{static_cast<uint64_t>(dim) + 99};
      const Table table(kRows, dim, OptimizerKind::kSgd, random);
      Batch batch(dim, Mode::kWeighted, random);
      Feature& feature = batch.features[0];
      feature.pooling = pooling;
      Floats expected(feature.ids.size());
      for (size_t b = 0; b < kBags; ++b) {
        const int64_t length = feature.offsets[b + 1] - feature.offsets[b];
        for (auto i = static_cast<size_t>(feature.offsets[b]);
             i < static_cast<size_t>(feature.offsets[b + 1]); ++i) {
          std::vector<float> products;
          for (int64_t d = 0; d < dim; ++d) {
            products.push_back(batch.grad[b * static_cast<size_t>(batch.stride) +
                                          static_cast<size_t>(feature.column + d)] *
                               table.view.weight[feature.ids[i] * dim + d]);
          }
          const float coefficient =
              pooling == Pooling::kMean ? 1.0f / static_cast<float>(length) : 1.0f;
          expected[i] = coefficient * sum_across(products);
        }
      }
      for (const Isa isa : all) {
        use_isa(isa);
        Floats out(feature.ids.size());
        per_sample_weight_grad(table.view, feature.bags(), 0, 7, batch.grad.data(), batch.stride,
                               out.data());
        per_sample_weight_grad(table.view, feature.bags(), 7, kBags, batch.grad.data(),
                               batch.stride, out.data());
        CHECK_CASE(same(out, expected), name(dim, isa));
      }
    }
  }
}

void update_gives_reference_bits(const std::vector<Isa>& all) {
  for (const int64_t dim : kDims) {
    for (const OptimizerKind optimizer : kOptimizers) {
      for (const Mode mode : kModes) {
        Random random{static_cast<uint64_t>(dim) * 31 + static_cast<uint64_t>(mode) + 1};
        const Batch batch(dim, mode, random);
        const uint64_t seed = random.next();
        const float scale = mode == Mode::kMean ? 0.37f : 1.0f;
        Random fresh{seed};
        Table expected(kRows, dim, optimizer, fresh);
        const RowTerms terms = row_terms(batch.features, kBags, batch.grad.data(), batch.stride);
        for (const auto& [row, row_terms] : terms) {
          update_reference(expected.view, row, sum_reference(row_terms, dim), 0.05f, 1e-3f, scale);
        }
        TableLookups lookups;
        batch.build(lookups);
        for (const Isa isa : all) {
          use_isa(isa);
          for (const uint64_t split : {uint64_t{0}, uint64_t{1}, lookups.num_rows() / 2 + 1}) {
            Random again{seed};
            Table table(kRows, dim, optimizer, again);
            UpdateJob job;
            job.table = table.view;
            job.lookups = &lookups;
            job.grad = batch.grad.data();
            job.learning_rate = 0.05f;
            job.eps = 1e-3f;
            job.grad_scale = scale;
            update_rows(job, 0, split);
            update_rows(job, split, lookups.num_rows());
            CHECK_CASE(same(table.weight, expected.weight), name(dim, isa));
            CHECK_CASE(same(table.state, expected.state), name(dim, isa));
          }
        }
      }
    }
  }
}

void norms_give_reference_bits(const std::vector<Isa>& all) {
  for (const int64_t dim : kDims) {
    for (const Mode mode : {Mode::kSum, Mode::kWeighted}) {
      Random random{static_cast<uint64_t>(dim) + 4};
      const Batch batch(dim, mode, random);
      TableLookups lookups;
      batch.build(lookups);
      std::vector<double> expected;
      for (const auto& [row, terms] :
           row_terms(batch.features, kBags, batch.grad.data(), batch.stride)) {
        std::vector<double> squares;
        for (const float g : sum_reference(terms, dim))
          squares.push_back(static_cast<double>(g) * static_cast<double>(g));
        expected.push_back(sum_across(squares));
      }
      for (const Isa isa : all) {
        use_isa(isa);
        std::vector<double> out(lookups.num_rows());
        row_grad_norm_sq(lookups, batch.grad.data(), dim, 0, 3, out.data());
        row_grad_norm_sq(lookups, batch.grad.data(), dim, 3, lookups.num_rows(), out.data() + 3);
        CHECK_CASE(out == expected, name(dim, isa));
      }
    }
  }
}

// A packed table and the same table said to have more than 2^32 rows give the same bits.
void wide_lookups_give_the_bits_of_packed_ones() {
  Random random{77};
  const Batch batch(32, Mode::kSum, random);
  const uint64_t seed = random.next();
  std::vector<Floats> weights;
  for (const uint64_t table_rows : {kRows, uint64_t{1} << 33}) {
    TableLookups lookups;
    batch.build(lookups, table_rows);
    CHECK_EQUAL(lookups.is_wide, table_rows > kRows);
    Random again{seed};
    Table table(kRows, 32, OptimizerKind::kRowWiseAdagrad, again);
    UpdateJob job;
    job.table = table.view;
    job.lookups = &lookups;
    job.grad = batch.grad.data();
    job.learning_rate = 0.1f;
    update_rows(job, 0, lookups.num_rows());
    weights.push_back(std::move(table.weight));
  }
  CHECK(same(weights[0], weights[1]));
}

void empty_ranges_do_nothing(const std::vector<Isa>& all) {
  const int64_t no_bags[] = {0};
  for (const Isa isa : all) {
    use_isa(isa);
    Random random{3};
    Table table(4, 16, OptimizerKind::kSgd, random);
    const Floats before = Table(std::move(table)).weight;
    Random again{3};
    Table untouched(4, 16, OptimizerKind::kSgd, again);
    const FeatureBags bags{nullptr, no_bags, nullptr, Pooling::kSum, 0};
    TableLookups lookups;
    lookups.build(&bags, 1, 0, 16, 4);
    CHECK_EQUAL(lookups.num_rows(), 0u);
    CHECK_EQUAL(lookups.begin.size(), 1u);
    lookups.build(nullptr, 0, 0, 16, 4);
    CHECK_EQUAL(lookups.num_lookups(), 0u);
    lookup(untouched.view, bags, 0, 0, nullptr, 16);
    UpdateJob job;
    job.table = untouched.view;
    job.lookups = &lookups;
    update_rows(job, 0, 0);
    row_grad_norm_sq(lookups, nullptr, 16, 0, 0, nullptr);
    copy_rows_to_log(untouched.view, lookups.rows.data(), nullptr, 0, RecordColumns{}, nullptr);
    CHECK(same(before, untouched.weight));
    CHECK(!has_non_finite(nullptr, 0));
  }
}

void non_finite_values_are_found(const std::vector<Isa>& all) {
  const float bad[] = {
      std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
      std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::signaling_NaN()};
  for (const Isa isa : all) {
    use_isa(isa);
    for (const size_t n : {1u, 15u, 16u, 100u, 4095u, 4097u, 10000u}) {
      std::vector<float> values(n, std::numeric_limits<float>::max());
      values[n / 3] = std::numeric_limits<float>::denorm_min();
      values[n / 2] = -0.0f;
      CHECK(!has_non_finite(values.data(), n));
      for (const float x : bad) {
        for (const size_t at : {size_t{0}, n / 2, n - 1}) {
          const float good = values[at];
          values[at] = x;
          CHECK_CASE(has_non_finite(values.data(), n), isa_name(isa));
          values[at] = good;
        }
      }
    }
  }
}

uint64_t mix_reference(uint64_t z) {
  z ^= z >> 30;
  z *= 0xbf58476d1ce4e5b9u;
  z ^= z >> 27;
  z *= 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

void initial_weights_are_a_function_of_their_place(const std::vector<Isa>& all) {
  // SplitMix64 started at 0 first adds 0x9e3779b97f4a7c15 and finalises it to this published value.
  CHECK_EQUAL(mix_reference(0x9e3779b97f4a7c15u), 0xe220a8397b1dcdafu);
  for (const Isa isa : all) {
    use_isa(isa);
    for (const int64_t dim : kDims) {
      const float scale = 0.3f;
      Floats out(50 * static_cast<size_t>(dim), -9);
      initialize_rows(out.data(), dim, 10, 17, 42, 0xabcdef, scale);
      initialize_rows(out.data(), dim, 17, 50, 42, 0xabcdef, scale);
      bool matches = true;
      for (uint64_t row = 10; row < 50; ++row) {
        for (uint64_t column = 0; column < static_cast<uint64_t>(dim); ++column) {
          const uint64_t h =
              mix_reference(mix_reference(mix_reference(42 ^ 0xabcdefu) ^ row) ^ column);
          const double u = static_cast<double>(h >> 40) * 0x1p-24;
          const float x = out[row * static_cast<uint64_t>(dim) + column];
          matches &= x == static_cast<float>(2 * u - 1) * scale && x >= -scale && x < scale;
        }
      }
      CHECK_CASE(matches, name(dim, isa));
      CHECK_EQUAL(out[10 * static_cast<size_t>(dim) - 1], -9.0f);
    }
    Floats many(100000);
    initialize_rows(many.data(), 100, 0, 1000, 7, 7, 1.0f);
    const double mean = std::accumulate(many.data(), many.data() + many.size(), 0.0) / 1e5;
    CHECK(std::fabs(mean) < 0.01);
  }
}

void float_mode_is_set_and_restored() {
  volatile float smallest = std::numeric_limits<float>::min();
#if defined(__x86_64__)
  const unsigned before = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(before | 0x8040u |
                         0x6000u);  // flush to zero, denormals are zero, round towards zero
  volatile float half = smallest * 0.5f;
  CHECK_EQUAL(half, 0.0f);
  {
    const FloatMode mode;
    half = smallest * 0.5f;
    CHECK(half > 0.0f);
    CHECK_EQUAL(__builtin_ia32_stmxcsr() & 0xe040u, 0u);
  }
  CHECK_EQUAL(__builtin_ia32_stmxcsr() & 0xe040u, 0xe040u);
  __builtin_ia32_ldmxcsr(before);
#else
  const FloatMode mode;
  volatile float half = smallest * 0.5f;
  CHECK(half > 0.0f);
#endif
}

}  // namespace

int main() {
  const FloatMode mode;
  const std::vector<Isa> all = isas();
  for (const Isa isa : all) std::printf("testing %s\n", isa_name(isa));
  lookup_gives_reference_bits(all);
  reference_is_close_to_double();
  weight_grad_gives_reference_bits(all);
  update_gives_reference_bits(all);
  norms_give_reference_bits(all);
  wide_lookups_give_the_bits_of_packed_ones();
  empty_ranges_do_nothing(all);
  non_finite_values_are_found(all);
  initial_weights_are_a_function_of_their_place(all);
  float_mode_is_set_and_restored();
  return check_result();
}
