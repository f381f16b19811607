// Who writes the undo log, and how that is chosen.
#pragma once

#include <cstdint>
#include <string>

#include "stopwatch.h"

namespace tcxl {

// Who writes the undo records: the background thread ahead of the step (the paper's batch-aware
// checkpoint), or the update itself while a row is in cache. kAuto: FormChoice.
enum class UndoForm : uint32_t { kAuto, kBackground, kFused };

// "auto", "background", "fused".
inline UndoForm undo_form(const std::string& name) {
  return name == "background" ? UndoForm::kBackground
         : name == "fused"    ? UndoForm::kFused
                              : UndoForm::kAuto;
}

// Processors that this process may use: of its affinity, within the quota of its control group.
double count_cpus();

// What kAuto takes. The background form costs nothing where its work fits into the time that the
// trainer spends outside the engine (dense part, data) and a processor is idle meanwhile; where
// not, its own pass over the rows makes it the dearer one.
class FormChoice {
 public:
  explicit FormChoice(double cpus) : cpus_(cpus) {}

  // Time in the engine since the last commit goes here.
  uint64_t& busy_ns() { return busy_ns_; }
  // A batch of `rows` rows has committed, for which the background has worked `background_ns`.
  void note_commit(uint64_t rows, uint64_t background_ns);
  // Forgets what was seen since the last choice.
  void begin_window();

  bool is_fused() const { return is_fused_; }
  // The rest of the step is long enough to hide the log's writing.
  bool is_step_long() const { return is_step_long_; }

 private:
  const double cpus_;
  bool is_fused_ = false, is_step_long_ = true;
  double work_ns_per_row_ = 0;  // of the background; 0: not yet known
  uint64_t busy_ns_ = 0;
  Stopwatch since_commit_;
  ProcessorTime cpu_since_commit_;
  struct Window {
    uint64_t commits = 0, roomy = 0, idle = 0;
    uint64_t work_ns = 0, worked_rows = 0;
  };
  Window window_;
};

}  // namespace tcxl
