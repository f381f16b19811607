// The built-in data set: every value is a pure function of (seed, sample number).
// The same recipe, operation by operation, as src/trainingcxl/data/synthetic.py; docs/data.md
// explains it.
#pragma once

#include <cstdint>
#include <vector>

namespace tcxl {

struct SyntheticDense {
  double missing;    // share of missing values
  double mean;       // of the normal inside the exponential
  double deviation;  // of the normal inside the exponential
  double shift;      // added to the rounded value
  double weight;     // of the field in the teacher
};

struct SyntheticField {
  std::int64_t cardinality;  // rows, in [1, 2^31)
  double span;               // (cardinality + 1)^(1 - exponent) - 1, or log(cardinality + 1)
  double inverse;            // 1 / (1 - exponent), or 0 when the exponent is 1
  std::int64_t multiplier;   // coprime to cardinality, spreads hot ranks over the table
  std::int64_t offset;
  std::int64_t hotness;  // lookups a sample
};

struct SyntheticPair {
  std::int64_t a;
  std::int64_t b;
};

struct SyntheticSpec {
  std::uint64_t seed;
  double bias;
  double rho;
  std::uint64_t block_samples;
  std::uint64_t block_ids;
  std::vector<SyntheticDense> dense;
  std::vector<SyntheticField> fields;
  std::vector<SyntheticPair> pairs;  // numbers of fields
};

// Caller's buffers, row-major. `lookups` is the sum of the fields' hotness.
struct SyntheticOutput {
  float* dense;       // count x dense.size(): log1p, missing and negative as 0
  std::int64_t* ids;  // count x lookups
  float* label;       // count: 0 or 1
  double* score;      // count: logit of the teacher
};

std::int64_t synthetic_lookups(const SyntheticSpec& spec);

// Returns what is wrong with `spec`, or nullptr. Checked once, before the first batch.
const char* synthetic_check(const SyntheticSpec& spec);

// Computes `count` samples. `samples` holds their numbers, each >= 0. Thread-safe; never fails.
void synthetic_batch(const SyntheticSpec& spec, const std::int64_t* samples, std::int64_t count,
                     const SyntheticOutput& out);

}  // namespace tcxl
