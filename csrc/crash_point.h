// Test hook: the process kills itself with SIGKILL at a chosen point of the protocol. Every fence
// is a point, and so are named places between two stores whose order matters. One predictable
// branch when disarmed. No standard headers: the kernels are built for several vector widths and
// must not share inline code.
#pragma once

namespace tcxl {

namespace internal {
extern bool crash_points_armed;
void pass_crash_point(const char* name);
}  // namespace internal

static inline void crash_point(const char* name) {
  if (__atomic_load_n(&internal::crash_points_armed, __ATOMIC_RELAXED)) [[unlikely]]
    internal::pass_crash_point(name);
}

}  // namespace tcxl
