// The Python face of the engine. Arrays cross as buffer views and are never copied (noconvert), so
// a wrong dtype or stride is an error and not a lost result.
#include "bind_engine.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;
using namespace nb::literals;

namespace tcxl {
namespace {

using Integers = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats1 = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats2 = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutFloats1 = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutFloats2 = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
// group, bags, values, offsets, weights
using InputTuple = std::tuple<size_t, int64_t, Integers, Integers, std::optional<Floats1>>;

bool is_int32(const Integers& array, const char* what) {
  if (array.dtype() == nb::dtype<int32_t>()) return true;
  if (array.dtype() == nb::dtype<int64_t>()) return false;
  throw nb::type_error(text(what, " must be int32 or int64").c_str());
}

GroupInput group_input(size_t group, int64_t bags, const Integers& values, const Integers& offsets,
                       const std::optional<Floats1>& weights) {
  GroupInput in;
  in.group = group;
  in.bags = bags;
  in.values = values.data();
  in.values_are_int32 = is_int32(values, "indices");
  in.num_values = static_cast<int64_t>(values.shape(0));
  in.offsets = offsets.data();
  in.offsets_are_int32 = is_int32(offsets, "offsets");
  in.num_offsets = static_cast<int64_t>(offsets.shape(0));
  if (weights) {
    if (weights->shape(0) != values.shape(0))
      fail(ErrorKind::kValue, "there are ", weights->shape(0), " per-sample weights for ",
           values.shape(0), " indices");
    in.weights = weights->data();
    if (in.weights == nullptr)
      in.weights = reinterpret_cast<const float*>(alignof(float));  // empty, but given
  }
  return in;
}

nb::dict stats_dict(const Stats& s) {
  nb::dict d;
#define FIELD(name) d[#name] = s.name
  FIELD(batches), FIELD(lookups), FIELD(rows), FIELD(rows_handed_over), FIELD(log_bytes),
      FIELD(dense_bytes);
  FIELD(unannounced), FIELD(log_growths), FIELD(lookup_ns), FIELD(flag_wait_ns), FIELD(fused),
      FIELD(update_ns);
  FIELD(commit_ns), FIELD(dense_wait_ns), FIELD(background_log_ns), FIELD(background_sort_ns),
      FIELD(background_dense_ns);
  FIELD(dense_copy_ns), FIELD(corrected_lookups), FIELD(late_lookups), FIELD(early_wait_ns),
      FIELD(background_early_ns);
#undef FIELD
  return d;
}

nb::dict journal_stats_dict(const JournalStats& s) {
  nb::dict d;
#define FIELD(name) d[#name] = s.name
  FIELD(journal_bytes), FIELD(journal_syncs), FIELD(checkpoints), FIELD(rows_previous);
  FIELD(previous_wait_ns), FIELD(lag_wait_ns), FIELD(data_sync_ns);
#undef FIELD
  return d;
}

void bind_lookups(nb::class_<CorePool>& pool) {
  pool.def(
      "add_group",
      [](CorePool& self,
         const std::vector<std::tuple<std::string, size_t, uint32_t, int64_t, int64_t>>& features,
         int64_t stride) {
        Group group;
        group.stride = stride;
        for (const auto& [name, table, pooling, col, padding] : features) {
          const int64_t dim = table_at(self, table).view.dim;
          if (col < 0 || col + dim > stride)
            fail(ErrorKind::kValue, "feature '", name, "' does not fit the pooled output");
          group.features.push_back({name, table, static_cast<Pooling>(pooling), col, padding});
        }
        return self.engine().add_group(group);
      },
      "features"_a, "stride"_a);
  pool.def(
      "announce",
      [](CorePool& self, const std::vector<InputTuple>& inputs) {
        std::vector<GroupInput> converted;
        for (const auto& [group, bags, values, offsets, weights] : inputs)
          converted.push_back(group_input(group, bags, values, offsets, weights));
        nb::gil_scoped_release released;
        return self.engine().announce(converted);
      },
      "inputs"_a);
  pool.def(
      "lookup",
      [](CorePool& self, size_t group, int64_t bags, const Integers& values,
         const Integers& offsets, const std::optional<Floats1>& weights, OutFloats2 out,
         bool is_training) {
        const GroupInput input = group_input(group, bags, values, offsets, weights);
        if (static_cast<int64_t>(out.shape(0)) != bags ||
            static_cast<int64_t>(out.shape(1)) != self.engine().group(group).stride)
          fail(ErrorKind::kValue, "the pooled output has the wrong shape");
        nb::gil_scoped_release released;
        return self.engine().lookup(input, out.data(), is_training);
      },
      "group"_a, "bags"_a, "values"_a.noconvert(), "offsets"_a.noconvert(),
      "weights"_a.noconvert().none(), "out"_a.noconvert(), "is_training"_a = true);
  pool.def(
      "per_sample_weight_grad",
      [](CorePool& self, const Lookup& lookup, Floats2 grad, OutFloats1 out) {
        if (static_cast<int64_t>(grad.shape(0)) != lookup.batch().bags ||
            out.shape(0) < lookup.batch().num_given())
          fail(ErrorKind::kValue, "gradient and lookup have different shapes");
        nb::gil_scoped_release released;
        self.engine().per_sample_weight_grad(lookup, grad.data(), out.data());
      },
      "lookup"_a, "grad"_a.noconvert(), "out"_a.noconvert());
  pool.def(
      "prepare",
      [](CorePool& self, const std::vector<std::pair<std::shared_ptr<Lookup>, Floats2>>& parts,
         uint64_t through) {
        std::vector<Part> converted;
        for (const auto& [lookup, grad] : parts) {
          const GroupBatch& batch = lookup->batch();
          if (static_cast<int64_t>(grad.shape(0)) != batch.bags ||
              static_cast<int64_t>(grad.shape(1)) != self.engine().group(batch.group).stride)
            fail(ErrorKind::kValue, "gradient and lookup have different shapes");
          converted.push_back({lookup, grad.data()});
        }
        nb::gil_scoped_release released;
        self.engine().prepare(converted, through);
      },
      "parts"_a, "through"_a);
}

void bind_commits(nb::class_<CorePool>& pool) {
  const auto nogil = nb::call_guard<nb::gil_scoped_release>();
  pool.def("grad_norm_sq", [](CorePool& self) { return self.engine().grad_norm_sq(); }, nogil);
  pool.def(
      "commit",
      [](CorePool& self, const std::vector<std::pair<float, float>>& settings, float scale,
         nb::bytes resume) {
        if (settings.size() != self.store().tables().size())
          fail(ErrorKind::kValue, "there must be one setting per table");
        std::vector<RowSettings> rows;
        for (const auto& [lr, eps] : settings) rows.push_back({lr, eps});
        const std::string record(resume.c_str(), resume.size());
        nb::gil_scoped_release released;
        return self.engine().commit(rows, scale, record);
      },
      "settings"_a, "grad_scale"_a, "resume"_a);
  pool.def(
      "commit_record",
      [](CorePool& self, nb::bytes resume) {
        self.engine().commit_record(std::string(resume.c_str(), resume.size()));
      },
      "resume"_a);
  pool.def("drop_announced", &CorePool::drop_announced, nogil);
  pool.def(
      "capture",
      [](CorePool& self, nb::bytes resume,
         const std::vector<std::pair<uint64_t, uint64_t>>& parts) {
        std::vector<DenseLog::Part> converted;
        for (const auto& [address, bytes] : parts)
          converted.push_back({reinterpret_cast<const void*>(address), bytes});
        const std::string record(resume.c_str(), resume.size());
        nb::gil_scoped_release released;
        self.engine().capture(record, converted);
      },
      "resume"_a, "parts"_a);
  pool.def(
      "recall_previous", [](CorePool& self) { return self.engine().recall_previous(); }, nogil);
  pool.def("wait_dense", [](CorePool& self) { self.engine().wait_dense(); }, nogil);
  pool.def(
      "set_dense_every", [](CorePool& self, uint64_t k) { self.engine().set_dense_every(k); },
      "batches"_a);
  pool.def(
      "set_undo_log",
      [](CorePool& self, const std::string& form) { self.engine().set_undo_form(undo_form(form)); },
      "form"_a);
}

void bind_state(nb::class_<CorePool>& pool) {
  const auto nogil = nb::call_guard<nb::gil_scoped_release>();
  pool.def("is_dense_due", [](CorePool& self) { return self.engine().is_dense_due(); });
  pool.def_prop_ro("committed", [](CorePool& self) { return self.engine().committed(); });
  pool.def_prop_ro("dense_batch", [](CorePool& self) { return self.engine().dense_batch(); });
  pool.def_prop_ro("log_used_bytes", [](CorePool& self) { return self.engine().log_used_bytes(); });
  pool.def("stats", [](CorePool& self) {
    nb::dict d = stats_dict(self.engine().stats());
    d.update(journal_stats_dict(self.journal() ? self.journal()->stats() : JournalStats{}));
    return d;
  });
  pool.def(
      "begin_snapshot", [](CorePool& self, const std::string& path) { self.begin_snapshot(path); },
      "path"_a, nogil);
  pool.def("snapshot_progress",
           [](CorePool& self) -> std::optional<std::tuple<uint64_t, uint64_t, uint64_t, bool>> {
             const Snapshot* s = self.engine().snapshot();
             if (s == nullptr) return std::nullopt;
             return std::tuple(s->batch(), s->bytes_done(), s->bytes_total(), s->is_done());
           });
  pool.def(
      "wait_snapshot",
      [](CorePool& self) {
        if (self.engine().snapshot() != nullptr) self.engine().snapshot()->wait();
      },
      nogil);
  // None where durability is not a matter of time: `process`, or `power` on DAX.
  pool.def("durable_batch", [](CorePool& self) -> std::optional<uint64_t> {
    return self.journal() ? std::optional(self.journal()->durable_batch()) : std::nullopt;
  });
}

nb::dict counts_dict(const BatchCounts& c) {
  nb::dict d;
#define FIELD(name) d[#name] = c.name
  FIELD(batch), FIELD(is_announced), FIELD(is_fused), FIELD(lookups), FIELD(rows);
  FIELD(lookup_bytes), FIELD(row_bytes), FIELD(log_bytes), FIELD(slot_bytes);
  FIELD(recurring_rows), FIELD(recurring_lookups), FIELD(first_rows);
  FIELD(log_share), FIELD(reduce_share);
#undef FIELD
  return d;
}

void bind_traces(nb::class_<CorePool>& pool) {
  pool.def(
      "trace_start",
      [](CorePool& self, uint64_t spans_max) { self.engine().start_trace(spans_max); },
      "spans_max"_a);
  pool.def("trace_stop", [](CorePool& self) { self.store().trace().stop(); });
  // Spans as (phase, track, batch, begin, end), times as of time.perf_counter_ns; counts of the
  // batches; how many of either were dropped.
  pool.def("trace_take", [](CorePool& self) {
    const Trace::Taken taken = self.store().trace().take();
    nb::list spans, counts;
    for (const TraceSpan& s : taken.spans) {
      spans.append(
          nb::make_tuple(phase_name(s.phase), track_name(s.track), s.batch, s.begin_ns, s.end_ns));
    }
    for (const BatchCounts& c : taken.counts) counts.append(counts_dict(c));
    return std::tuple(spans, counts, taken.dropped);
  });
}

}  // namespace

void bind_engine(nb::module_& module, nb::class_<CorePool>& pool) {
  nb::class_<Lookup>(module, "Lookup",
                     "What one lookup call read; kept until its gradient is committed.")
      .def_prop_ro("is_announced", [](const Lookup& self) { return self.step != nullptr; });
  bind_lookups(pool);
  bind_commits(pool);
  bind_state(pool);
  bind_traces(pool);
}

}  // namespace tcxl
