#include "crash_point.h"

#include <signal.h>
#include <unistd.h>

#include <cstring>
#include <mutex>

#include "crash_control.h"
#include "recording.h"

namespace tcxl {

namespace internal {
unsigned crash_points_armed = 0;
}  // namespace internal

namespace {

struct Trap {
  std::mutex mutex;
  int64_t countdown = 0;
  std::string name;
  int report_fd = -1;
  std::map<std::string, uint64_t> passed;
};

Trap& trap() {
  static Trap the_trap;
  return the_trap;
}

}  // namespace

void internal::note_streamed(const void* p, unsigned long bytes) { recording::flush(p, bytes); }

void internal::pass_crash_point(const char* name) {
  recording::point(name);
  Trap& t = trap();
  const std::lock_guard lock(t.mutex);
  ++t.passed[name];
  if (t.countdown == 0 || std::strncmp(name, t.name.c_str(), t.name.size()) != 0 ||
      --t.countdown > 0)
    return;
  if (t.report_fd >= 0 && ::write(t.report_fd, name, std::strlen(name)) < 0) t.report_fd = -1;
  ::kill(::getpid(), SIGKILL);
  while (true) ::pause();  // no store after the point, should the signal take its time
}

void arm_crash_points(int64_t countdown, const std::string& name, int report_fd) {
  Trap& t = trap();
  const std::lock_guard lock(t.mutex);
  t.countdown = countdown > 0 ? countdown : 0;
  t.name = name;
  t.report_fd = report_fd;
  t.passed.clear();
  if (countdown >= 0) {
    __atomic_fetch_or(&internal::crash_points_armed, internal::kTrapped, __ATOMIC_RELAXED);
  } else {
    __atomic_fetch_and(&internal::crash_points_armed, ~internal::kTrapped, __ATOMIC_RELAXED);
  }
}

std::map<std::string, uint64_t> crash_points_passed() {
  Trap& t = trap();
  const std::lock_guard lock(t.mutex);
  return t.passed;
}

}  // namespace tcxl
