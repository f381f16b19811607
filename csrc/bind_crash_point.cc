// The Python face of the crash test hook (csrc/crash_point.h).
#include "bind_crash_point.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include "crash_control.h"

namespace nb = nanobind;
using namespace nb::literals;

void bind_crash_point(nb::module_& module) {
  module.def("kill_at_persist", &tcxl::arm_crash_points, "countdown"_a, "name"_a = "",
             "report_fd"_a = -1,
             "Test hook: SIGKILL to this process at the countdown-th crash point from now whose "
             "name begins with "
             "`name`; 0 only counts points, negative disarms.");
  module.def("crash_points_passed", &tcxl::crash_points_passed,
             "Test hook: how often each point was passed since it was armed.");
}
