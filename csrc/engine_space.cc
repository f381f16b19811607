// Space of the undo log: how large its ring is, when it grows, and what a step does that finds no
// room.
#include <algorithm>

#include "engine.h"
#include "errors.h"
#include "stopwatch.h"

namespace tcxl {

namespace {

constexpr uint64_t kRingBytesMin = 4ull << 20;
constexpr uint64_t kRingFrames = 64;  // horizon that a ring chosen by us has room for ...
constexpr uint64_t kRingBytesUsual = 512ull << 20;  // ... unless that is more than this

}  // namespace

void Engine::grow_log(uint64_t frame_bytes) {
  const uint64_t frames = 2 * (options_.lookahead + 2);
  uint64_t bytes = options_.log_bytes;
  if (bytes == 0) {
    const uint64_t frame = frame_bytes + frame_bytes / 2;
    bytes =
        std::max({kRingBytesMin, frames * frame, std::min(kRingFrames * frame, kRingBytesUsual)});
  } else if (undo_.ring_bytes() > 0 || frames * frame_bytes > bytes) {
    fail(ErrorKind::kFull, "the undo log of batch ", committed_ + 1, " needs ", frame_bytes,
         " bytes, log_bytes = ", bytes, " has room for ", bytes / frames, "\n  where: pool '",
         store_.path(), "'\n  state: the pool is unchanged at batch ", committed_,
         "\n  do:    raise log_bytes to ", frames * frame_bytes, ", or use smaller batches");
  }
  undo_.grow(bytes, bytes / frames);
  ++stats_.log_growths;
}

void Engine::admit_to_journal(Lock& lock, const Step& step) {
  const uint64_t frame_bytes = step.plan.bytes + kResumeUsual;
  lock.unlock();
  journal_->check();
  journal_->ensure_ring(frame_bytes);
  lock.lock();
  // In this order: a checkpoint that ends in between has made room.
  if (!journal_->is_checkpointing() && !journal_->has_room(frame_bytes)) fail_log_full("journal");
}

// Refuses a batch that is larger than the pool's limits, and grows the log for one that is larger
// than any before: here, so that no error is left for the time after the dense optimizer's step.
void Engine::admit(Lock& lock, Step& step) {
  ensure_sorted(lock, step);
  if (options_.without_log) return;
  if (journal_ != nullptr) admit_to_journal(lock, step);
  const FramePlan& plan = step.plan;
  if (options_.rows_per_batch_max > 0 && plan.records > options_.rows_per_batch_max) {
    fail(ErrorKind::kFull, "batch ", committed_ + 1, " changes ", plan.records,
         " rows, rows_per_batch_max is ", options_.rows_per_batch_max, "\n  where: pool '",
         store_.path(), "'\n  state: the pool is unchanged at batch ", committed_,
         "\n  do:    raise rows_per_batch_max, or use smaller batches");
  }
  if (undo_.ring_bytes() > 0 && plan.bytes <= store_.geometry().frame_bytes_max) {
    // Said here, before the dense optimizer's step; never met by a loop that captures when due.
    if (step.log == LogState::kNone && !undo_.has_room(plan.bytes) && !dense_.is_writing())
      fail_log_full("undo log");
    return;
  }
  reset_log_from(lock, 0);
  grow_log(plan.bytes);
}

void Engine::fail_log_full(const char* log) const {
  fail(ErrorKind::kFull, "the ", log,
       " is full: its batches wait for a dense generation, the newest "
       "is of batch ",
       dense_.newest() ? dense_.newest()->header.batch : 0, "\n  where: pool '", store_.path(),
       "'\n  state: the pool is unchanged at batch ", committed_,
       "\n  do:    capture a generation whenever one is due, as FaultTolerantRun does");
}

// The ring had no room: waits for the dense generation that frees old frames.
void Engine::make_room(Lock& lock) {
  const Stopwatch watch;
  if (!dense_.is_writing()) fail_log_full("undo log");
  const uint64_t writing = dense_.writing_batch();
  changed_.wait(lock, [&] {
    return !dense_.is_writing() || dense_.writing_batch() != writing || stop_ || has_stopped();
  });
  stats_.dense_wait_ns += watch.ns();
}

}  // namespace tcxl
