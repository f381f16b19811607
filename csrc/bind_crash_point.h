#pragma once

#include <nanobind/nanobind.h>

// Adds the crash test hook to the native module.
void bind_crash_point(nanobind::module_& module);
