// The Python face of the power-failure record (csrc/recording.h).
#include "bind_recording.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "fault.h"
#include "recording.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <typename T>
nb::bytes bytes_of(const std::vector<T>& items) {
  return nb::bytes(reinterpret_cast<const char*>(items.data()), items.size() * sizeof(T));
}

nb::tuple stop() {
  const tcxl::recording::Record record = tcxl::recording::stop();
  return nb::make_tuple(bytes_of(record.events), bytes_of(record.places), bytes_of(record.values),
                        record.names);
}

}  // namespace

void bind_recording(nb::module_& module) {
  module.def(
      "record_start",
      [](const std::vector<std::string>& paths,
         const std::vector<std::pair<std::string, uint64_t>>& delays) {
        std::vector<tcxl::recording::Delay> converted;
        for (const auto& [point, microseconds] : delays) converted.push_back({point, microseconds});
        tcxl::recording::start(paths, converted);
      },
      "paths"_a, "delays"_a = std::vector<std::pair<std::string, uint64_t>>(),
      "Test hook: records the stores, flushes, fences and syncs of these files; pools must "
      "be opened after it. Delays: crash points and microseconds.");
  module.def("record_stop", &stop,
             "Test hook: ends the record. Events (csrc/recording.h), places and values of changed "
             "words, names.");
  module.def("record_mark", &tcxl::recording::mark, "text"_a,
             "Test hook: puts a mark into the record.");
#ifdef TCXL_FAULTS
  module.def(
      "plant_fault",
      [](unsigned number) {
        if (number >= static_cast<unsigned>(tcxl::Fault::kCount))
          throw nb::index_error("there is no such fault");
        tcxl::internal::planted_fault = static_cast<tcxl::Fault>(number);
      },
      "number"_a, "Build with faults: plants this one (csrc/fault.h), 0 none.");
#endif
}
