// What the guest of the virtual machine rig trains, twice: batches as a pure function of their
// number, and the same training in plain memory by plain loops, to compare a recovered pool with.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "../native/kernels_reference.h"
#include "layout.h"
#include "store.h"

namespace tcxl::vm {

struct Shape {
  const char* name;
  uint64_t rows;
  uint32_t dim;
  OptimizerKind optimizer;
  bool has_check = false;  // rows with checksums
};

inline constexpr Shape kShapes[] = {{"a", 4000, 24, OptimizerKind::kAdagrad},
                                    {"b", 300, 16, OptimizerKind::kRowWiseAdagrad, true},
                                    {"c", 40, 5, OptimizerKind::kSgd}};
inline constexpr int64_t kBags = 32, kLookups = 4;
inline constexpr float kLearningRate = 0.05f, kEps = 1e-8f, kScale = 0.5f;
inline constexpr uint64_t kSeed = 11;
inline constexpr size_t kDenseBytes = 12'000;

inline int64_t stride() {
  int64_t sum = 0;
  for (const Shape& shape : kShapes) sum += shape.dim;
  return sum;
}

inline layout::TableRecord record_of(const Shape& shape) {
  layout::TableRecord r{};
  std::memcpy(r.name, shape.name, std::strlen(shape.name));
  r.rows = shape.rows;
  r.dim = shape.dim;
  r.optimizer = static_cast<uint32_t>(shape.optimizer);
  r.has_check = shape.has_check ? 1 : 0;
  r.init_seed = kSeed;
  r.init_key = shape.rows;
  r.init_scale = kScale;
  return r;
}

inline uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Lookups with hot rows, so that batches overlap, and what the pooled rows are pulled to.
struct Batch {
  std::vector<test::Feature> features;   // one per table
  std::vector<int64_t> values, offsets;  // the same lookups, feature-major
  std::vector<float> target;             // [kBags][stride()]
};

inline Batch make_batch(uint64_t number) {
  test::Random random{mix(number)};
  Batch batch;
  batch.offsets.push_back(0);
  int64_t column = 0;
  for (const Shape& shape : kShapes) {
    test::Feature feature;
    feature.column = column;
    column += shape.dim;
    feature.offsets.push_back(0);
    for (int64_t b = 0; b < kBags; ++b) {
      for (int64_t k = 0; k < kLookups; ++k) {
        const auto rows = static_cast<int64_t>(shape.rows);
        const int64_t most = random.below(3) == 0 ? rows : 1 + rows / 50;
        feature.ids.push_back(random.below(most));
      }
      feature.offsets.push_back(static_cast<int64_t>(feature.ids.size()));
      batch.offsets.push_back(batch.offsets.back() + kLookups);
    }
    batch.values.insert(batch.values.end(), feature.ids.begin(), feature.ids.end());
    batch.features.push_back(std::move(feature));
  }
  for (int64_t i = 0; i < kBags * stride(); ++i) batch.target.push_back(random.uniform());
  return batch;
}

// The gradient of half the square of (pooled - target): it depends on the rows, so that a wrong
// row spreads.
inline std::vector<float> gradient(const Batch& batch, const std::vector<float>& pooled) {
  std::vector<float> grad(pooled.size());
  for (size_t i = 0; i < grad.size(); ++i) grad[i] = 0.1f * (pooled[i] - batch.target[i]);
  return grad;
}

// Bytes of the dense part after a batch.
inline std::vector<uint64_t> dense_part(uint64_t batch) {
  std::vector<uint64_t> words(kDenseBytes / sizeof(uint64_t));
  for (size_t i = 0; i < words.size(); ++i) words[i] = mix(batch * 1'000'003 + i);
  return words;
}

inline std::string resume_record(uint64_t batch) {
  return "{\"batch\": " + std::to_string(batch) + "}";
}

// The training in plain memory.
class Reference {
 public:
  Reference() {
    test::Random unused{1};
    for (const Shape& shape : kShapes) {
      tables_.emplace_back(shape.rows, shape.dim, shape.optimizer, unused);
      test::Table& table = tables_.back();
      std::fill_n(table.state.data(), table.state.size(), 0.0f);
      initialize_rows(table.view.weight, table.view.dim, 0, shape.rows, kSeed, shape.rows, kScale);
    }
  }

  uint64_t batch() const { return batch_; }

  void train_through(uint64_t last) {
    while (batch_ < last) step(make_batch(++batch_));
  }

  // Rows whose bytes, or whose state's, differ. (verify_rows looks at their checksums.)
  uint64_t count_different(const Store& store) const {
    uint64_t different = 0;
    for (size_t t = 0; t < tables_.size(); ++t) {
      const TableView& mine = tables_[t].view;
      const TableView& pool = store.tables().at(t).view;
      const auto dim = static_cast<size_t>(mine.dim);
      const auto states = static_cast<size_t>(state_dim(mine.optimizer, mine.dim));
      const auto pool_states = static_cast<size_t>(pool.state_floats());
      for (uint64_t r = 0; r < mine.rows; ++r) {
        const bool is_same =
            std::memcmp(mine.weight + r * dim, pool.weight + r * dim, dim * sizeof(float)) == 0 &&
            (states == 0 || std::memcmp(mine.state + r * states, pool.state + r * pool_states,
                                        states * sizeof(float)) == 0);
        different += is_same ? 0 : 1;
      }
    }
    return different;
  }

 private:
  void step(const Batch& batch) {
    std::vector<float> pooled(static_cast<size_t>(kBags * stride()));
    for (size_t t = 0; t < tables_.size(); ++t) {
      for (int64_t b = 0; b < kBags; ++b)
        test::lookup_reference(tables_[t].view, batch.features[t], static_cast<size_t>(b),
                               pooled.data() + b * stride());
    }
    const std::vector<float> grad = gradient(batch, pooled);
    for (size_t t = 0; t < tables_.size(); ++t) {
      const auto terms = test::row_terms({batch.features[t]}, kBags, grad.data(), stride());
      for (const auto& [row, of_row] : terms)
        test::update_reference(tables_[t].view, row,
                               test::sum_reference(of_row, tables_[t].view.dim), kLearningRate,
                               kEps, 1.0f);
    }
  }

  std::vector<test::Table> tables_;
  uint64_t batch_ = 0;
};

}  // namespace tcxl::vm
