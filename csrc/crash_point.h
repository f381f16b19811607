// Test hook: the process kills itself with SIGKILL at a chosen point of the protocol. Every fence
// is a point, and so are named places between two stores whose order matters. One predictable
// branch when disarmed.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>

namespace tcxl {

namespace internal {
extern std::atomic<bool> crash_points_armed;
void pass_crash_point(const char* name);
}  // namespace internal

// Dies at the `countdown`-th point from now whose name begins with `name` (empty: any point); the
// point's name is written to `report_fd` first (negative: not). countdown 0 counts points without
// dying; negative disarms.
void arm_crash_points(int64_t countdown, const std::string& name, int report_fd);
// How often each point was passed since it was armed.
std::map<std::string, uint64_t> crash_points_passed();

// Static, because the kernels are built for several vector widths and must not share inline code.
static inline void crash_point(const char* name) {
  if (internal::crash_points_armed.load(std::memory_order_relaxed)) [[unlikely]]
    internal::pass_crash_point(name);
}

}  // namespace tcxl
