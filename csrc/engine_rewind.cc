// The engine's part in a rewind: comes to rest, and goes on from the batch it was taken back to.
#include <algorithm>

#include "engine.h"
#include "errors.h"

namespace tcxl {

// Nothing is announced, being written or being copied.
void Engine::settle(Lock& lock) {
  store_.check_alive();
  check_background();
  drop_through(lock, ~0ull);
  queue_.clear();
  prepared_.reset();
  cancel_early(lock, nullptr);
  changed_.wait(lock, [&] { return !dense_.is_writing() || stop_; });
  check_background();
  if (snapshot_ && !snapshot_->is_done())
    fail(ErrorKind::kPool, "a snapshot of batch ", snapshot_->batch(),
         " is being taken\n  state: the pool is unchanged\n  do:    wait for it");
}

std::vector<RewindPoint> Engine::rewind_points() {
  Lock lock(mutex_);
  settle(lock);
  return tcxl::rewind_points(store_, undo_, dense_, committed_);
}

RecoveryReport Engine::rewind(uint64_t batch) {
  Lock lock(mutex_);
  settle(lock);
  const std::vector<RewindPoint> points = tcxl::rewind_points(store_, undo_, dense_, committed_);
  const auto point = std::find_if(points.begin(), points.end(),
                                  [&](const RewindPoint& p) { return p.batch == batch; });
  if (point == points.end() || !point->generation)
    fail(ErrorKind::kRecovery, "pool '", store_.path(), "' keeps no dense part of batch ", batch,
         " that its undo log reaches\n  state: the pool is unchanged at batch ", committed_,
         "\n  do:    'trainingcxl rewind ", store_.path(), " --list' shows what can be reached");
  uint64_t journal_life = 0;
  if (journal_ != nullptr) {
    journal_->settle();
    journal_life = journal_->life();
  }
  RecoveryReport report;
  try {
    report = tcxl::rewind(store_, undo_, dense_, *point->generation, journal_life);
    if (journal_ != nullptr) journal_->rebase(*store_.slot());
  } catch (const Error& error) {
    store_.poison(error.what());  // the next opening says where the pool stands
    throw;
  }
  committed_ = report.resumed_batch;
  previous_.forget();
  life_ = store_.max_life();
  last_captured_ = committed_;
  changed_.notify_all();
  return report;
}

}  // namespace tcxl
