// Plain loops that say what the kernels must compute, bit for bit, and random batches to try them
// on.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"

namespace tcxl::test {

struct Random {
  uint64_t state;
  uint64_t next() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state * 0x2545f4914f6cdd1du;
  }
  int64_t below(int64_t n) {
    return static_cast<int64_t>((next() >> 11) % static_cast<uint64_t>(n));
  }
  float uniform() { return static_cast<float>(next() >> 40) * 0x1p-23f - 1.0f; }  // [-1, 1)
};

// Floats that start on a cache line, with a guard after them.
class Floats {
 public:
  explicit Floats(size_t n, float value = 0) : size_(n) {
    const size_t bytes = (n * sizeof(float) + 64 + 63) / 64 * 64;
    data_.reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
    std::fill_n(data_.get(), bytes / sizeof(float), value);
  }
  float* data() { return data_.get(); }
  const float* data() const { return data_.get(); }
  size_t size() const { return size_; }
  float& operator[](size_t i) { return data_.get()[i]; }
  float operator[](size_t i) const { return data_.get()[i]; }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> data_;
  size_t size_;
};

struct Table {
  TableView view;
  Floats weight, state;
  Table(uint64_t rows, int64_t dim, OptimizerKind optimizer, Random& random)
      : weight(rows * static_cast<size_t>(dim)),
        state(rows * static_cast<size_t>(state_dim(optimizer, dim))) {
    for (size_t i = 0; i < weight.size(); ++i) weight[i] = random.uniform();
    for (size_t i = 0; i < state.size(); ++i) state[i] = std::fabs(random.uniform());
    view = {weight.data(), state.size() > 0 ? state.data() : nullptr, rows, dim, optimizer};
  }
  Table(const Table& other)
      : view(other.view), weight(other.weight.size()), state(other.state.size()) {
    std::copy_n(other.weight.data(), weight.size(), weight.data());
    std::copy_n(other.state.data(), state.size(), state.data());
    view.weight = weight.data();
    view.state = state.size() > 0 ? state.data() : nullptr;
  }
};

struct Feature {
  std::vector<int64_t> ids, offsets;
  std::vector<float> weights;  // empty: none
  Pooling pooling = Pooling::kSum;
  int64_t column = 0;
  FeatureBags bags() const {
    return {ids.data(), offsets.data(), weights.empty() ? nullptr : weights.data(), pooling,
            column};
  }
};

// Bags of very different lengths: none, one, some, and one of `long_bag`. Row 0 is hot (a long bag
// of 3000 gives it three chunks).
inline Feature random_feature(uint64_t rows, int64_t num_bags, int64_t long_bag, Pooling pooling,
                              bool weighted, int64_t column, Random& random) {
  Feature feature;
  feature.pooling = pooling;
  feature.column = column;
  feature.offsets.push_back(0);
  const int64_t lengths[] = {0, 1, 2, 5, 17};
  for (int64_t b = 0; b < num_bags; ++b) {
    const int64_t length = b == num_bags / 2 ? long_bag : lengths[random.below(5)];
    for (int64_t i = 0; i < length; ++i) {
      const int64_t choice = random.below(10);
      const int64_t hot = std::min<int64_t>(3, static_cast<int64_t>(rows));
      feature.ids.push_back(
          choice < 7 ? 0 : random.below(choice < 8 ? hot : static_cast<int64_t>(rows)));
      if (weighted) feature.weights.push_back(random.uniform());
    }
    feature.offsets.push_back(static_cast<int64_t>(feature.ids.size()));
  }
  return feature;
}

// Adds terms in chunks of kSumChunk, as kernels.h defines every sum over lookups.
class ChunkedSum {
 public:
  void add(float x) {
    if (in_chunk_ == kSumChunk) {
      total_ += chunk_;
      chunk_ = 0;
      in_chunk_ = 0;
    }
    chunk_ += x;
    ++in_chunk_;
  }
  float value() const { return total_ + chunk_; }

 private:
  float total_ = 0, chunk_ = 0;
  int64_t in_chunk_ = 0;
};

// Sixteen lanes and a fixed tree, as kernels.h defines every sum across a row.
template <typename T>
T sum_across(const std::vector<T>& terms) {
  T lane[16] = {};
  for (size_t k = 0; k < terms.size(); ++k) lane[k % 16] += terms[k];
  for (size_t step = 8; step > 0; step /= 2) {
    for (size_t i = 0; i < step; ++i) lane[i] += lane[i + step];
  }
  return lane[0];
}

inline void lookup_reference(const TableView& table, const Feature& feature, size_t bag,
                             float* out) {
  const auto begin = static_cast<size_t>(feature.offsets[bag]),
             end = static_cast<size_t>(feature.offsets[bag + 1]);
  for (int64_t d = 0; d < table.dim; ++d) {
    ChunkedSum sum;
    for (size_t i = begin; i < end; ++i) {
      const float x = table.weight[feature.ids[i] * table.dim + d];
      sum.add(feature.weights.empty() ? x : feature.weights[i] * x);
    }
    float value = sum.value();
    if (feature.pooling == Pooling::kMean && end > begin) value /= static_cast<float>(end - begin);
    out[feature.column + d] = value;
  }
}

struct Term {
  const float* grad;
  float coefficient;
  bool has_coefficient;
};
using RowTerms = std::map<uint64_t, std::vector<Term>>;

// Per distinct row its gradient terms: features in order, bags in order, lookups in order.
inline RowTerms row_terms(const std::vector<Feature>& features, size_t num_bags, const float* grad,
                          int64_t stride) {
  RowTerms terms;
  for (const Feature& f : features) {
    for (size_t b = 0; b < num_bags; ++b) {
      const int64_t length = f.offsets[b + 1] - f.offsets[b];
      for (auto i = static_cast<size_t>(f.offsets[b]); i < static_cast<size_t>(f.offsets[b + 1]);
           ++i) {
        float coefficient = f.weights.empty() ? 1.0f : f.weights[i];
        if (f.pooling == Pooling::kMean) coefficient /= static_cast<float>(length);
        terms[static_cast<uint64_t>(f.ids[i])].push_back(
            {grad + static_cast<int64_t>(b) * stride + f.column, coefficient, coefficient != 1.0f});
      }
    }
  }
  return terms;
}

inline std::vector<float> sum_reference(const std::vector<Term>& terms, int64_t dim) {
  std::vector<float> sum;
  for (int64_t d = 0; d < dim; ++d) {
    ChunkedSum one;
    for (const Term& term : terms)
      one.add(term.has_coefficient ? term.coefficient * term.grad[d] : term.grad[d]);
    sum.push_back(one.value());
  }
  return sum;
}

inline void update_reference(const TableView& table, uint64_t row, std::vector<float> g, float lr,
                             float eps, float scale) {
  const auto dim = static_cast<size_t>(table.dim);
  float* w = table.weight + row * dim;
  for (float& x : g) x *= scale;
  if (table.optimizer == OptimizerKind::kSgd) {
    for (size_t d = 0; d < dim; ++d) w[d] -= lr * g[d];
  } else if (table.optimizer == OptimizerKind::kAdagrad) {
    float* s = table.state + row * dim;
    for (size_t d = 0; d < dim; ++d) {
      s[d] += g[d] * g[d];
      w[d] -= lr * g[d] / (std::sqrt(s[d]) + eps);
    }
  } else {
    std::vector<float> squares;
    for (const float x : g) squares.push_back(x * x);
    float& s = table.state[row];
    s += sum_across(squares) / static_cast<float>(dim);
    const float step = lr / (std::sqrt(s) + eps);
    for (size_t d = 0; d < dim; ++d) w[d] -= step * g[d];
  }
}

// Memory for the undo records of `count` rows, filled with a pattern.
struct Log {
  std::vector<uint64_t> row;
  std::vector<uint32_t> crc;
  std::vector<uint64_t> done;
  Floats state, weight;
  RecordColumns columns;
  Log(size_t count, const TableView& table)
      : row(count + 1, ~uint64_t{0}),
        crc(count + 1, 0x5a5a5a5au),
        done(count + 1, 0),
        state((count + 1) * static_cast<size_t>(state_dim(table.optimizer, table.dim)), -77),
        weight((count + 1) * static_cast<size_t>(table.dim), -77) {
    columns = {row.data(), crc.data(), state.data(), weight.data(), done.data(), 0x1234567u};
  }
};

}  // namespace tcxl::test
