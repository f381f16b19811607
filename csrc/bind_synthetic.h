#pragma once

#include <nanobind/nanobind.h>

// Adds the class SyntheticGenerator to the native module.
void bind_synthetic(nanobind::module_& module);
