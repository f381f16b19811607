#include "undo_form.h"

#include <sched.h>

#include <algorithm>
#include <fstream>

namespace tcxl {

namespace {

constexpr uint64_t kWindow = 16;       // commits between two choices
constexpr double kReturnMargin = 1.5;  // so that the choice does not swing
// Idle time over the background's work. Where all processors are busy its own work is all that
// would be idle without it, so more than that shows that there is one to spare.
constexpr double kStayIdle = 1.5, kReturnIdle = 2.0;

// Of the control group (version 2) that the process sees as the root, in processors; 0: none.
double cpu_quota() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  double quota = 0, period = 0;
  return file >> quota >> period && period > 0 ? quota / period : 0;  // "max" is no number
}

}  // namespace

double count_cpus() {
  cpu_set_t set;
  const bool is_known = ::sched_getaffinity(0, sizeof set, &set) == 0;
  const double allowed = is_known ? CPU_COUNT(&set) : 1;
  const double quota = cpu_quota();
  return quota > 0 ? std::min(quota, allowed) : allowed;
}

void FormChoice::begin_window() {
  busy_ns_ = 0;
  since_commit_ = Stopwatch();
  cpu_since_commit_ = ProcessorTime();
  window_ = Window();
}

void FormChoice::note_commit(uint64_t rows, uint64_t background_ns) {
  const uint64_t wall = since_commit_.ns();
  const auto room = static_cast<double>(wall - std::min(wall, busy_ns_));
  // What the background computed itself would have been idle without it.
  const double used =
      static_cast<double>(cpu_since_commit_.ns()) - static_cast<double>(background_ns);
  const double idle = cpus_ * static_cast<double>(wall) - used;
  const double work = work_ns_per_row_ * static_cast<double>(rows);
  // A vote a commit: one long pause (an evaluation, say) is no room in the others.
  window_.roomy += room >= (is_fused_ ? kReturnMargin : 1.0) * work ? 1 : 0;
  window_.idle += idle >= (is_fused_ ? kReturnIdle : kStayIdle) * work ? 1 : 0;
  window_.work_ns += background_ns;
  window_.worked_rows += background_ns > 0 ? rows : 0;
  busy_ns_ = 0;
  since_commit_ = Stopwatch();
  cpu_since_commit_ = ProcessorTime();
  if (++window_.commits < kWindow) return;
  const bool was_known = work_ns_per_row_ > 0;
  if (window_.worked_rows > 0) {
    work_ns_per_row_ =
        static_cast<double>(window_.work_ns) / static_cast<double>(window_.worked_rows);
  }
  if (was_known) {
    is_step_long_ = 2 * window_.roomy >= kWindow;
    is_fused_ = !is_step_long_ || 2 * window_.idle < kWindow;
  }
  window_ = Window();
}

}  // namespace tcxl
