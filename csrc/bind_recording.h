// Bindings of the record that power-failure tests are made from.
#pragma once

#include <nanobind/nanobind.h>

void bind_recording(nanobind::module_& module);
