// The Python face of a pool. Converts, checks, releases the GIL; no logic.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "bind_crash_point.h"
#include "bind_engine.h"
#include "bind_recording.h"
#include "bind_synthetic.h"
#include "crc32c.h"
#include "errors.h"
#include "row_check.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tcxl {
namespace {

using Bytes = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;

nb::dict report_dict(const RecoveryReport& r) {
  nb::dict d;
  d["has_point"] = r.has_point;
  d["is_exact"] = r.is_exact;
  d["is_rewind"] = r.is_rewind;
  d["committed_batch"] = r.committed_batch;
  d["dense_batch"] = r.dense_batch;
  d["resumed_batch"] = r.resumed_batch;
  d["batches_undone"] = r.frames_undone;
  d["rows_rolled_back"] = r.rows_rolled_back;
  d["rows_changed"] = r.rows_changed;
  d["resume"] = nb::bytes(r.resume.data(), r.resume.size());
  return d;
}

nb::list tables_list(CorePool& pool) {
  nb::list out;
  for (const Table& table : pool.store().tables()) {
    nb::dict d;
    d["name"] = table.name;
    d["num_embeddings"] = table.record.rows;
    d["embedding_dim"] = table.record.dim;
    d["optimizer"] = table.record.optimizer;
    d["state_dim"] = state_dim(table.view.optimizer, table.view.dim);
    d["has_check"] = table.view.has_check;
    d["weight_bytes"] = table.record.weight_bytes;
    d["state_bytes"] = table.record.state_bytes;
    d["weight_offset"] = table.record.weight_offset;
    d["state_offset"] = table.record.state_offset;
    d["init_seed"] = table.record.init_seed;
    d["init_key"] = table.record.init_key;
    d["init_scale"] = table.record.init_scale;
    out.append(d);
  }
  return out;
}

nb::dict facts_dict(CorePool& pool) {
  Store& store = pool.store();
  nb::dict d;
  d["uuid"] = store.uuid_text();
  d["medium"] = medium_name(store.medium().kind);
  d["file_system"] = store.medium().file_system;
  d["is_network"] = store.medium().is_network;
  d["is_copy_on_write"] = store.medium().is_copy_on_write;
  d["durability"] = durability_name(store.durability());
  d["flush"] = store.persistence().instruction();
  d["page_bytes"] = store.data().bytes() > 0 ? store.data().page_bytes() : layout::kPage;
  d["log_bytes"] = store.geometry().log_bytes;
  d["data_bytes"] = store.geometry().data_bytes;
  d["ring_bytes"] = store.geometry().ring_bytes;
  d["frame_bytes_max"] = store.geometry().frame_bytes_max;
  d["was_created"] = store.was_created();
  d["was_clean"] = store.was_clean();
  d["creation_note"] = store.creation_note();
  d["had_failed_sync"] = store.had_failed_sync();
  d["has_journal"] = store.has_journal();
  d["needs_journal"] = store.needs_journal();
  return d;
}

size_t add_table(CorePool& pool, const std::string& name, uint64_t rows, uint32_t dim,
                 uint32_t optimizer, uint64_t seed, uint64_t key, float scale, bool has_check) {
  if (name.empty() || name.size() >= layout::kTableNameBytes)
    fail(ErrorKind::kValue, "table name '", name, "' must have 1 to ", layout::kTableNameBytes - 1,
         " bytes");
  if (rows == 0 || dim == 0)
    fail(ErrorKind::kValue, "table '", name, "' has ", rows, " rows of dim ", dim,
         "; both must be at least 1");
  layout::TableRecord record{};
  std::memcpy(record.name, name.data(), name.size());
  record.rows = rows;
  record.dim = dim;
  record.optimizer = optimizer;
  record.init_seed = seed;
  record.init_key = key;
  record.init_scale = scale;
  record.has_check = has_check ? 1 : 0;
  return pool.store().add_table(record);
}

// Views of a column, [rows][width] float32; they keep the pool alive, closing the pool leaves them
// mapped.
nb::ndarray<nb::numpy, float, nb::ndim<2>> column(nb::handle owner, float* data, uint64_t rows,
                                                  uint64_t width) {
  return nb::ndarray<nb::numpy, float, nb::ndim<2>>(
      data, {static_cast<size_t>(rows), static_cast<size_t>(width)}, owner);
}

void initialize(CorePool& pool, size_t index, uint64_t begin, uint64_t end) {
  const Table& table = table_at(pool, index);
  if (begin > end || end > table.view.rows) throw nb::index_error("rows out of range");
  const auto states = static_cast<uint64_t>(table.view.state_floats());
  const auto dim = static_cast<uint64_t>(table.view.dim);
  nb::gil_scoped_release released;
  pool.store().check_alive();
  float* weight = table.view.weight + begin * dim;
  initialize_rows(table.view.weight, table.view.dim, begin, end, table.record.init_seed,
                  table.record.init_key, table.record.init_scale);
  pool.store().persistence().flush(weight, (end - begin) * dim * sizeof(float));
  if (states > 0) {
    float* state = table.view.state + begin * states;
    std::memset(state, 0, (end - begin) * states * sizeof(float));
    if (table.view.has_check) set_checks(table.view, begin, end);
    pool.store().persistence().flush(state, (end - begin) * states * sizeof(float));
  }
  pool.store().persistence().fence();
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    if (error.kind == ErrorKind::kIndex) return PyErr_SetString(PyExc_IndexError, error.what());
    if (error.kind == ErrorKind::kValue) return PyErr_SetString(PyExc_ValueError, error.what());
    if (error.kind == ErrorKind::kOs) {
      const nb::object instance = nb::borrow(PyExc_OSError)(error.os_error, error.what());
      return PyErr_SetObject(PyExc_OSError, instance.ptr());
    }
    const char* name = "PoolError";
    if (error.kind == ErrorKind::kLocked) name = "PoolLocked";
    if (error.kind == ErrorKind::kCorrupted) name = "PoolCorrupted";
    if (error.kind == ErrorKind::kFull) name = "PoolFull";
    if (error.kind == ErrorKind::kVersion) name = "PoolVersionError";
    if (error.kind == ErrorKind::kDurability) name = "DurabilityUnavailable";
    if (error.kind == ErrorKind::kRecovery) name = "RecoveryError";
    PyErr_SetString(nb::module_::import_("trainingcxl.errors").attr(name).ptr(), error.what());
  }
}

void bind_evidence(nb::class_<CorePool>& pool) {
  // The four below look at the bytes alone: they serve `inspect`, which never recovers.
  pool.def("newest_dense_batch", [](CorePool& self) -> std::optional<uint64_t> {
    const auto generation = self.evidence();
    return generation ? std::optional(generation->header.batch) : std::nullopt;
  });
  pool.def("horizon_batches", [](CorePool& self) -> uint64_t {
    if (!self.evidence()) return 0;
    const layout::Slot& slot = *self.store().slot();
    UndoLog undo(self.store());
    undo.attach();
    undo.adopt(slot.batch, slot.life);
    return slot.batch - undo.oldest();
  });
  pool.def("journal_durable", [](CorePool& self) -> std::optional<uint64_t> {
    const std::string path = self.store().path() + "/journal";
    if (::access(path.c_str(), F_OK) != 0) return std::nullopt;
    return newest_durable(JournalFile(self.store()));
  });
  pool.def("log_bytes_live", [](CorePool& self) -> uint64_t {
    const auto generation = self.evidence();
    if (!generation) return 0;
    const layout::Slot& slot = *self.store().slot();
    UndoLog undo(self.store());
    uint64_t bytes = 0;
    for (uint64_t n = generation->header.batch + 1; n <= slot.batch + kLookaheadMax; ++n) {
      if (const auto descriptor = undo.find(n, slot.life)) bytes += descriptor->bytes;
    }
    return bytes;
  });
}

void bind_contents(nb::class_<CorePool>& pool) {
  pool.def("facts", &facts_dict);
  pool.def("tables", &tables_list);
  pool.def("slot", [](CorePool& self) -> std::optional<nb::dict> {
    if (!self.store().slot()) return std::nullopt;
    const layout::Slot& slot = *self.store().slot();
    nb::dict d;
    d["batch"] = slot.batch;
    d["life"] = slot.life;
    d["seq"] = slot.seq;
    const std::string resume = self.store().read_resume(slot);
    d["resume"] = nb::bytes(resume.data(), resume.size());
    return d;
  });
  pool.def("dense_blob", [](nb::handle self) -> std::optional<Bytes> {  // a view
    CorePool& core = nb::cast<CorePool&>(self);
    if (!core.dense().newest()) return std::nullopt;
    const Generation& g = *core.dense().newest();
    auto* data = reinterpret_cast<uint8_t*>(const_cast<std::byte*>(core.dense().blob(g)));
    return Bytes(data, {static_cast<size_t>(g.header.blob_bytes)}, self);
  });
  pool.def("dense_resume", [](CorePool& self) -> std::optional<nb::bytes> {
    if (!self.dense().newest()) return std::nullopt;
    const std::string resume = self.dense().read_resume(*self.dense().newest());
    return nb::bytes(resume.data(), resume.size());
  });
  pool.def("add_table", &add_table, "name"_a, "rows"_a, "dim"_a, "optimizer"_a, "seed"_a, "key"_a,
           "scale"_a, "has_check"_a = false);
  pool.def("initialize_rows", &initialize, "table"_a, "begin"_a, "end"_a);
  pool.def("commit_tables", [](CorePool& self) { self.store().commit_tables(); });
  pool.def(
      "weight",
      [](nb::handle self, size_t index) {
        const Table& t = table_at(nb::cast<CorePool&>(self), index);
        return column(self, t.view.weight, t.view.rows, static_cast<uint64_t>(t.view.dim));
      },
      "table"_a);
  pool.def(
      "state",
      [](nb::handle self, size_t index) {
        const Table& t = table_at(nb::cast<CorePool&>(self), index);
        return column(self, t.view.state, t.view.rows,
                      static_cast<uint64_t>(t.view.state_floats()));
      },
      "table"_a);
  pool.def("verify", [](CorePool& self) {
    std::vector<std::tuple<std::string, std::string, std::string>> out;
    std::vector<Damage> found = verify(self.store());
    verify_journal(self.store(), found);
    verify_rows(self.store(), found);
    for (const Damage& d : found) out.emplace_back(d.region, d.where, d.what);
    return out;
  });
  pool.def_prop_ro("is_poisoned", [](CorePool& self) { return self.store().is_poisoned(); });
  pool.def("sync", [](CorePool& self) { self.sync(); }, nb::call_guard<nb::gil_scoped_release>());
  pool.def("close", &CorePool::close, "is_clean"_a, nb::call_guard<nb::gil_scoped_release>());
}

void bind_rewind(nb::class_<CorePool>& pool) {
  // (batch, resume record of its dense generation or None), newest first.
  pool.def("rewind_points", [](CorePool& self) {
    std::vector<RewindPoint> points;
    {
      nb::gil_scoped_release released;
      points = self.rewind_points();
    }
    nb::list out;
    for (const RewindPoint& point : points) {
      nb::object record = nb::none();
      if (point.generation) {
        const std::string resume = self.dense().read_resume(*point.generation);
        record = nb::bytes(resume.data(), resume.size());
      }
      out.append(nb::make_tuple(point.batch, record));
    }
    return out;
  });
  pool.def(
      "rewind",
      [](CorePool& self, uint64_t batch) {
        RecoveryReport report;
        {
          nb::gil_scoped_release released;
          report = self.rewind(batch);
        }
        return report_dict(report);
      },
      "batch"_a);
}

void bind_repair(nb::class_<CorePool>& pool) {
  // (batch, batch of the dense part), newest first.
  pool.def("repair_points", [](CorePool& self) {
    std::vector<std::pair<uint64_t, uint64_t>> out;
    for (const RepairPoint& point : self.repair_points())
      out.emplace_back(point.batch, point.generation.header.batch);
    return out;
  });
  pool.def("clear_damaged", [](CorePool& self) { self.clear_damaged(); });
  pool.def(
      "repair", [](CorePool& self, uint64_t batch) { return report_dict(self.repair(batch)); },
      "batch"_a);
}

void bind_pool(nb::module_& m) {
  nb::class_<CorePool> pool(m, "Pool",
                            "One open pool: files, logs, engine. Private; use trainingcxl.Pool.");
  pool.def(
      "__init__",
      [](CorePool* self, const std::string& path, const std::string& device,
         const std::string& durability, bool read_only, bool unlocked, bool trust_after_reboot,
         const std::string& force_medium, bool assume_reboot, bool sparse) {
        nb::gil_scoped_release released;
        new (self) CorePool(path, device, durability, read_only, unlocked, trust_after_reboot,
                            force_medium, assume_reboot, sparse);
      },
      "path"_a, "device"_a, "durability"_a, "read_only"_a, "unlocked"_a, "trust_after_reboot"_a,
      "force_medium"_a, "assume_reboot"_a, "sparse"_a);
  pool.def(
      "recover",
      [](CorePool& self, bool exact) {
        RecoveryReport report;
        {
          nb::gil_scoped_release released;
          report = self.recover(exact);
        }
        return report_dict(report);
      },
      "exact"_a);
  pool.def(
      "start",
      [](CorePool& self, int threads, uint64_t lookahead, uint64_t log_bytes,
         uint64_t rows_per_batch_max, const std::string& undo_log, uint64_t lag_max,
         uint64_t journal_bytes, int64_t keep_dense, bool is_relaxed) {
        EngineOptions options{threads, lookahead, log_bytes, rows_per_batch_max};
        options.without_log = undo_log == "none";
        options.undo_form = undo_form(undo_log);
        options.lag_max = lag_max;
        options.is_relaxed = is_relaxed;
        options.journal_bytes = journal_bytes;
        if (keep_dense >= 0) options.keep_dense = static_cast<uint64_t>(keep_dense);
        self.start(options);
      },
      "threads"_a, "lookahead"_a, "log_bytes"_a, "rows_per_batch_max"_a, "undo_log"_a, "lag_max"_a,
      "journal_bytes"_a, "keep_dense"_a = -1, "is_relaxed"_a = false);
  bind_contents(pool);
  bind_evidence(pool);
  bind_rewind(pool);
  bind_repair(pool);
  bind_engine(m, pool);
}

}  // namespace
}  // namespace tcxl

NB_MODULE(_core, m) {
  using namespace tcxl;
  m.doc() = "Native core of TrainingCXL. Private: its names change without notice.";
  // A loss that is kept until the interpreter ends keeps its lookup and the pool: no leak of ours.
  nb::set_leak_warnings(false);
  nb::register_exception_translator(translate);
  bind_pool(m);
  bind_synthetic(m);
  bind_crash_point(m);
  bind_recording(m);
  m.def("discard_pool", &discard_pool, "path"_a);
  m.def(
      "crc32c", [](nb::bytes data, uint32_t crc) { return crc32c(crc, data.c_str(), data.size()); },
      "data"_a, "crc"_a = 0);
  m.def("isa", [] { return std::string(isa_name(current_isa())); });
  m.def(
      "use_isa",
      [](const std::string& name) {
        for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
          if (name == isa_name(isa)) return use_isa(isa);
        }
        throw nb::value_error("unknown vector width");
      },
      "name"_a);
}
