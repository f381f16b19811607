// Arming the crash test hook of crash_point.h.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace tcxl {

// Dies at the `countdown`-th point from now whose name begins with `name` (empty: any point); the
// point's name is written to `report_fd` first (negative: not). countdown 0 counts points without
// dying; negative disarms.
void arm_crash_points(int64_t countdown, const std::string& name, int report_fd);
// How often each point was passed since it was armed.
std::map<std::string, uint64_t> crash_points_passed();

}  // namespace tcxl
