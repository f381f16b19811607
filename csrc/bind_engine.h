#pragma once

#include <nanobind/nanobind.h>

#include "core_pool.h"

namespace tcxl {

// Adds announce, lookup, commit and their like to the class of the native pool.
void bind_engine(nanobind::module_& module, nanobind::class_<CorePool>& pool);

}  // namespace tcxl
