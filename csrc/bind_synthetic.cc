// Python face of the built-in data set: converts and checks arguments, releases the GIL.
#include "bind_synthetic.h"

#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>

#include "synthetic.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Doubles = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using DoubleRows = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Integers = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IntegerRows = nb::ndarray<const std::int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutDense = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutIds = nb::ndarray<std::int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutLabel = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutScore = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

class SyntheticGenerator {
 public:
  SyntheticGenerator(std::uint64_t seed, double bias, double rho, std::uint64_t block_samples,
                     std::uint64_t block_ids, const DoubleRows& dense, const Doubles& weights,
                     const Integers& cardinality, const Doubles& span, const Doubles& inverse,
                     const Integers& multiplier, const Integers& offset, const Integers& hotness,
                     const IntegerRows& pairs)
      : spec_{seed, bias, rho, block_samples, block_ids, {}, {}, {}} {
    const std::size_t fields = cardinality.shape(0);
    if (dense.shape(1) != 4 || weights.shape(0) != dense.shape(0) || pairs.shape(1) != 2 ||
        std::min({span.shape(0), inverse.shape(0), multiplier.shape(0), offset.shape(0),
                  hotness.shape(0)}) != fields ||
        std::max({span.shape(0), inverse.shape(0), multiplier.shape(0), offset.shape(0),
                  hotness.shape(0)}) != fields) {
      throw nb::value_error("SyntheticGenerator: lengths of the constants disagree");
    }
    for (std::size_t k = 0; k < dense.shape(0); ++k) {
      const double* row = dense.data() + 4 * k;
      spec_.dense.push_back({row[0], row[1], row[2], row[3], weights.data()[k]});
    }
    for (std::size_t j = 0; j < fields; ++j) {
      spec_.fields.push_back({cardinality.data()[j], span.data()[j], inverse.data()[j],
                              multiplier.data()[j], offset.data()[j], hotness.data()[j]});
    }
    for (std::size_t p = 0; p < pairs.shape(0); ++p) {
      spec_.pairs.push_back({pairs.data()[2 * p], pairs.data()[2 * p + 1]});
    }
    if (const char* problem = tcxl::synthetic_check(spec_)) throw nb::value_error(problem);
  }

  void batch(const Integers& samples, const OutDense& dense, const OutIds& ids,
             const OutLabel& label, const OutScore& score) const {
    const std::size_t count = samples.shape(0);
    const auto lookups = static_cast<std::size_t>(tcxl::synthetic_lookups(spec_));
    if (dense.shape(0) != count || dense.shape(1) != spec_.dense.size() || ids.shape(0) != count ||
        ids.shape(1) != lookups || label.shape(0) != count || score.shape(0) != count) {
      throw nb::value_error("SyntheticGenerator.batch: shapes of the buffers disagree");
    }
    nb::gil_scoped_release released;
    tcxl::synthetic_batch(spec_, samples.data(), static_cast<std::int64_t>(count),
                          {dense.data(), ids.data(), label.data(), score.data()});
  }

 private:
  tcxl::SyntheticSpec spec_;
};

}  // namespace

void bind_synthetic(nb::module_& module) {
  nb::class_<SyntheticGenerator>(module, "SyntheticGenerator",
                                 "Computes samples of the built-in data set.")
      .def(nb::init<std::uint64_t, double, double, std::uint64_t, std::uint64_t, const DoubleRows&,
                    const Doubles&, const Integers&, const Doubles&, const Doubles&,
                    const Integers&, const Integers&, const Integers&, const IntegerRows&>(),
           nb::kw_only(), "seed"_a, "bias"_a, "rho"_a, "block_samples"_a, "block_ids"_a,
           "dense"_a.noconvert(), "weights"_a.noconvert(), "cardinality"_a.noconvert(),
           "span"_a.noconvert(), "inverse"_a.noconvert(), "multiplier"_a.noconvert(),
           "offset"_a.noconvert(), "hotness"_a.noconvert(), "pairs"_a.noconvert())
      .def("batch", &SyntheticGenerator::batch, "samples"_a.noconvert(), "dense"_a.noconvert(),
           "ids"_a.noconvert(), "label"_a.noconvert(), "score"_a.noconvert(),
           "Fill the buffers with the given samples; releases the GIL.");
}
