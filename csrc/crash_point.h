// Test hook: the process kills itself with SIGKILL at a chosen point of the protocol
// (crash_control.h), or what was stored up to it is recorded (recording.h). Every fence is a point,
// and so are named places between two stores whose order matters. One predictable branch when
// disarmed. No standard headers: the kernels are built for several vector widths and
// must not share inline code.
#pragma once

namespace tcxl {

namespace internal {
inline constexpr unsigned kTrapped = 1, kRecorded = 2;
extern unsigned crash_points_armed;
void pass_crash_point(const char* name);
void note_streamed(const void* p, unsigned long bytes);
}  // namespace internal

static inline void crash_point(const char* name) {
  if (__atomic_load_n(&internal::crash_points_armed, __ATOMIC_RELAXED)) [[unlikely]]
    internal::pass_crash_point(name);
}

// [p, p + bytes) was written with non-temporal stores: durable with the next fence, without a
// flush.
static inline void streamed(const void* p, unsigned long bytes) {
  if (__atomic_load_n(&internal::crash_points_armed, __ATOMIC_RELAXED)) [[unlikely]]
    internal::note_streamed(p, bytes);
}

}  // namespace tcxl
