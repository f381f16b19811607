// The engine's dense log: capturing generations, writing them in slices, and what follows from a
// complete one. Questions about the engine's state.
#include <algorithm>
#include <chrono>
#include <thread>

#include "engine.h"
#include "errors.h"
#include "fault.h"
#include "stopwatch.h"

namespace tcxl {

void Engine::capture(const std::string& resume, const std::vector<DenseLog::Part>& parts) {
  Lock lock(mutex_);
  store_.check_alive();
  check_background();
  Stopwatch watch;
  Traced waiting(trace(), Phase::kDenseWait, committed_);
  changed_.wait(lock, [&] { return !dense_.is_writing() || stop_ || has_stopped(); });
  waiting.end();
  check_background();
  stats_.dense_wait_ns += watch.ns();
  watch = Stopwatch();
  const Traced copying(trace(), Phase::kDenseCapture, committed_);
  dense_.capture(committed_, life_, resume, parts,
                 {options_.keep_dense, undo_.ring_bytes(), undo_.oldest()});
  last_captured_ = committed_;
  if (has_fault(Fault::kReclaimEarly)) undo_.reclaim(committed_);
  for (const DenseLog::Part& part : parts) stats_.dense_bytes += part.bytes;
  stats_.dense_copy_ns += watch.ns();
  if (!store_.slot()) {  // batch 0: the commit that ends the creation of the pool
    while (!dense_.write_slice()) {
    }
    dense_.complete();
    dense_.publish();
    store_.write_slot(next_slot(committed_), resume);
    if (journal_ != nullptr) journal_->rebase(*store_.slot());
  } else if (journal_ != nullptr && journal_->wants_checkpoint()) {
    begin_checkpoint(lock);
  }
  changed_.notify_all();
}

// The tables stand at the batch of the generation that was just captured: the journal's next base.
void Engine::begin_checkpoint(Lock& lock) {
  is_paused_ = true;
  for (const auto& step : queue_)
    changed_.wait(lock, [&] { return !step->is_sorting || has_stopped(); });
  is_paused_ = false;
  journal_->begin_checkpoint(committed_);
  if (has_fault(Fault::kJournalNoReannounce)) return;
  for (const auto& step : queue_) step->is_previous_logged = false;
}

void Engine::begin_snapshot(const std::string& path, const std::string& resume) {
  Lock lock(mutex_);
  if (!store_.is_read_only()) store_.check_alive();
  if (options_.without_log) fail(ErrorKind::kPool, "a pool without undo log has no snapshots");
  if (snapshot_ && !snapshot_->is_done())
    fail(ErrorKind::kPool, "a snapshot of batch ", snapshot_->batch(), " is being taken already");
  snapshot_.reset();
  snapshot_ = std::make_unique<Snapshot>(store_, dense_, committed_, resume, path);
  is_snapshot_attached_ = true;
  snapshot_->start([this] { detach_snapshot(); });
}

// What was copied may hold rows of a batch whose update has begun: its records are wanted, too.
void Engine::detach_snapshot() {
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return !is_updating_ || stop_; });
  is_snapshot_attached_ = false;
}

void Engine::finish_generation() {
  dense_.publish();
  if (journal_ != nullptr) journal_->generation_finished(next_slot(committed_));
  // Relaxed lookup: resumed there, the first lookup needs the rows as they were before its batch.
  const uint64_t batch = dense_.newest()->header.batch;
  undo_.reclaim(batch - (options_.is_relaxed && batch > 0 ? 1 : 0));
  if (has_fault(Fault::kRelaxedReclaimEarly) && options_.is_relaxed) {
    undo_.reclaim(batch);
    undo_.give_up_kept();
  }
  // Where nothing hides the log's writing, a horizon nobody asked for would cost a part of the
  // step: its frames go round through all of the ring, out of the cache.
  const bool is_asked =
      options_.keep_dense != Horizon::kAuto || options_.undo_form != UndoForm::kAuto;
  if (is_fused_ && !form_choice_.is_step_long() && !is_asked) undo_.give_up_kept();
  for (auto& step : queue_) step->is_blocked = false;
}

void Engine::wait_dense() {
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return !dense_.is_writing() || has_stopped(); });
  check_background();
}

void Engine::set_dense_every(uint64_t batches) {
  std::lock_guard lock(mutex_);
  dense_every_ = std::max<uint64_t>(1, batches);
}

void Engine::set_undo_form(UndoForm form) {
  std::lock_guard lock(mutex_);
  options_.undo_form = form;
  is_fused_ = form == UndoForm::kFused;
  form_choice_.begin_window();
  changed_.notify_all();
}

bool Engine::is_dense_due() {
  std::lock_guard lock(mutex_);
  const bool is_half_full = undo_.ring_bytes() > 0 && 2 * undo_.used_bytes() >= undo_.ring_bytes();
  // With a generation in hand the capture waits for it: only if there is no room to put it off.
  const bool is_checkpoint_due =
      journal_ != nullptr &&
      (dense_.is_writing() ? journal_->needs_checkpoint() : journal_->wants_checkpoint());
  return committed_ - last_captured_ >= dense_every_ || is_checkpoint_due ||
         (is_half_full && !dense_.is_writing()) ||
         undo_.live_frames() > layout::kDirectoryEntries / 2;
}

uint64_t Engine::dense_batch() {
  std::lock_guard lock(mutex_);
  return dense_.newest() ? dense_.newest()->header.batch : layout::kNoBatch;
}

uint64_t Engine::log_used_bytes() {
  std::lock_guard lock(mutex_);
  return undo_.used_bytes();
}

Stats Engine::stats() {
  std::lock_guard lock(mutex_);
  return stats_;
}

// A generation takes the place of the one before the newest, and a recovery rewrites one there:
// with a journal none is complete before its batch is durable, or a power failure could leave none
// that the rows reach.
bool Engine::may_write_dense() const {
  if (has_fault(Fault::kJournalDenseOverNeeded)) return true;
  if (has_fault(Fault::kJournalDenseAhead))  // of one generation: none is free for a recovery's
    return !dense_.newest() || journal_->durable_batch() >= dense_.newest()->header.batch;
  return journal_ == nullptr || !dense_.is_body_written() ||
         journal_->durable_batch() >= dense_.writing_batch();
}

// The next slice of the dense generation; after the last one the header, which completes it.
void Engine::background_dense(Lock& lock) {
  const uint64_t batch = dense_.writing_batch();
  lock.unlock();
  const Stopwatch watch;
  Traced traced(trace(), Phase::kDenseLog, batch);
  if (has_fault(Fault::kReclaimEarly))  // a slow medium: the ring must overtake the generation
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
  const bool was_body_written = dense_.is_body_written();
  if (!was_body_written) dense_.write_slice();
  const bool completes = was_body_written || (dense_.is_body_written() && journal_ == nullptr);
  if (completes) dense_.complete();
  traced.end();
  const uint64_t ns = watch.ns();
  lock.lock();
  stats_.background_dense_ns += ns;
  if (!completes) return;
  finish_generation();
  changed_.notify_all();
}

}  // namespace tcxl
