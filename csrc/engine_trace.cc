// What a profile counts of each committed batch.
#include <memory>

#include "engine.h"

namespace tcxl {

void Engine::start_trace(uint64_t spans_max) {
  history_ = std::make_unique<RowHistory>();
  trace().start(spans_max);
}

void Engine::count_batch(const Step& step, uint64_t slot_bytes) {
  const Traced traced(trace(), Phase::kCount, committed_);
  BatchCounts counts;
  counts.batch = committed_;
  counts.is_announced = step.id != 0;
  counts.is_fused = step.is_fused;
  counts.log_bytes = options_.without_log ? 0 : step.plan.bytes;
  counts.slot_bytes = slot_bytes;
  history_->count(step, store_.tables(), counts);
  if (update_times_.all_ns > 0) {
    const auto all = static_cast<double>(update_times_.all_ns);
    counts.log_share = static_cast<double>(update_times_.log_ns) / all;
    counts.reduce_share = static_cast<double>(update_times_.reduce_ns) / all;
  }
  trace().add(counts);
}

}  // namespace tcxl
