// The engine's checkpointing logic: sorting, undo records, flags, and the background thread that
// does this ahead of the step that needs it.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "engine.h"
#include "errors.h"
#include "fault.h"
#include "stopwatch.h"

namespace tcxl {

namespace {

constexpr uint64_t kWorthSharing = 8192;  // lookups; below, waking threads costs more
}  // namespace

// --- sort and undo records

// Sorts every table's lookups and plans the frame of their undo records.
void Engine::sort(Step& step, bool parallel) {
  auto sort_table = [&](uint64_t t) {
    StepTable& table = step.tables[t];
    const GroupBatch& batch = step.groups[table.group];
    table.lookups.build(table.features.data(), table.features.size(), batch.bags,
                        groups_[batch.group].stride, store_.tables()[table.table].view.rows);
  };
  if (parallel && step.num_lookups() >= kWorthSharing) {
    workers_.run(step.num_tables, sort_table);
  } else {
    for (uint64_t t = 0; t < step.num_tables; ++t) sort_table(t);
  }
  step.plan.segments.clear();
  step.plan.bytes = step.plan.records = 0;
  for (size_t t = 0; t < step.num_tables; ++t) {
    const StepTable& table = step.tables[t];
    if (table.lookups.num_rows() == 0) continue;
    add_segment(step.plan, table.table, store_.tables()[table.table].view,
                table.lookups.num_rows());
  }
  lay_out(step.plan, sizeof(layout::FrameHeader));
}

// Reserves the frame. False: the ring has no room now. With the engine's mutex held.
bool Engine::begin_log(Step& step) {
  if (!options_.without_log && !undo_.reserve(step.batch, step.plan.bytes, step.frame_offset))
    return false;
  size_t segment = 0;
  for (size_t t = 0; t < step.num_tables && !options_.without_log; ++t) {
    StepTable& table = step.tables[t];
    if (table.lookups.num_rows() == 0) continue;
    table.columns =
        undo_.columns(step.frame_offset, step.plan.segments[segment++], step.batch, life_);
    table.own_records.clear();
  }
  step.log = LogState::kWriting;
  return true;
}

// Copies the rows that no earlier batch in flight will hand over: all of them, or own_records.
void Engine::copy_rows(Step& step, bool all) {
  for (size_t t = 0; t < step.num_tables; ++t) {
    const StepTable& table = step.tables[t];
    const auto& rows = table.lookups.rows;
    if (rows.empty()) continue;
    copy_rows_to_log(store_.tables()[table.table].view, rows.data(),
                     all ? nullptr : table.own_records.data(),
                     all ? rows.size() : table.own_records.size(), table.columns,
                     store_.persistence().flush_function());
    if (!has_fault(Fault::kNoRecordFence)) store_.persistence().fence();
  }
}

// Which rows of `step` the next batch changes too: their undo value for `next` is the value after
// `step`.
void Engine::match_with_next(Step& step, Step& next) {
  for (size_t t = 0; t < step.num_tables; ++t) step.tables[t].next_record.clear();
  for (size_t n = 0; n < next.num_tables; ++n) {
    StepTable& to = next.tables[n];
    const uint64_t count = to.lookups.num_rows();
    to.own_records.clear();
    StepTable* from = step.find(to.table);
    if (from != nullptr) match_rows(from->lookups.rows, to.lookups.rows, from->next_record);
    uint64_t record = 0;
    if (from != nullptr) {  // matches ascend: what lies between two of them is the next step's own
      for (const uint32_t matched : from->next_record) {
        if (matched == kNoRecord) continue;
        for (; record < matched; ++record) to.own_records.push_back(static_cast<uint32_t>(record));
        record = matched + 1ull;
      }
    }
    for (; record < count; ++record) to.own_records.push_back(static_cast<uint32_t>(record));
  }
}

void Engine::set_flag_if_complete(Step& step) {
  if (step.has_flag || step.log != LogState::kComplete || step.overlap_pending) return;
  if (!options_.without_log)
    undo_.set_flag(step.batch, life_, step.frame_offset, step.plan, step.is_fused);
  step.has_flag = true;
  stats_.log_bytes += step.plan.bytes;
}

void Engine::ensure_sorted(Lock& lock, Step& step) {
  Traced traced(trace(), Phase::kSort, committed_ + 1);
  changed_.wait(lock, [&] { return !step.is_sorting || has_stopped(); });
  check_background();
  if (step.is_sorted) return;
  step.is_sorting = true;
  lock.unlock();
  sort(step, true);
  lock.lock();
  step.is_sorting = false;
  step.is_sorted = true;
}

void Engine::ensure_flag(Lock& lock, Step& step) {
  const Stopwatch watch;
  const Traced traced(trace(), Phase::kFlagWait, committed_ + 1);
  while (step.log != LogState::kComplete) {
    check_background();
    if (step.log == LogState::kWriting) {
      changed_.wait(lock, [&] { return step.log != LogState::kWriting || has_stopped(); });
      continue;
    }
    step.batch = committed_ + 1;
    if (!begin_log(step)) {
      make_room(lock);
      continue;
    }
    step.is_fused = !options_.without_log;
    step.log = LogState::kComplete;
    stats_.fused += step.is_fused ? 1 : 0;
  }
  TCXL_ASSERT(!step.overlap_pending && step.batch == committed_ + 1);
  set_flag_if_complete(step);
  stats_.flag_wait_ns += watch.ns();
}

// --- dropping

// Takes back the logs of queue_[index ...]: they are written again for their new place in the
// order.
void Engine::reset_log_from(Lock& lock, size_t index) {
  is_paused_ = true;  // the background thread finishes what it has in hand and takes nothing new
  for (size_t i = index; i < queue_.size(); ++i) {
    Step& step = *queue_[i];
    changed_.wait(lock, [&] {
      return (!step.is_sorting && step.log != LogState::kWriting) || has_stopped();
    });
  }
  is_paused_ = false;
  undo_.release_from(committed_ + 1 + index);
  for (size_t i = index; i < queue_.size(); ++i) {
    Step& step = *queue_[i];
    step.log = LogState::kNone;
    step.overlap_pending = step.has_flag = step.is_next_mapped = step.hand_off_closed =
        step.is_blocked = false;
  }
  if (index > 0) queue_[index - 1]->is_next_mapped = false;
}

void Engine::drop_through(Lock& lock, uint64_t through) {
  if (queue_.empty() || queue_.front()->id > through) return;
  reset_log_from(lock, 0);
  while (!queue_.empty() && queue_.front()->id <= through) queue_.pop_front();
}

void Engine::drop_announced() {
  Lock lock(mutex_);
  drop_through(lock, ~0ull);
  prepared_.reset();
  changed_.notify_all();
}

// --- checkpointing logic: the background thread

void Engine::check_background() const {
  if (background_error_.empty()) return;
  store_.note_told();
  fail(
      ErrorKind::kPool, "pool '", store_.path(),
      "' cannot be used any more: its log writer stopped: ", background_error_, "\n  state: batch ",
      committed_,
      " is the last committed one\n  do:    look at the medium and the kernel's log, then open the "
      "pool again; it recovers");
}

bool Engine::can_log_previous(const Step& step) const {
  // A larger step waits for its admission: only there may the ring grow, and fail to.
  return journal_ != nullptr && !step.is_previous_logged && journal_->has_base() &&
         journal_->fits(step.plan.bytes + kResumeUsual);
}

void Engine::log_previous(Step& step) {
  if (!can_log_previous(step)) return;
  const Traced traced(trace(), Phase::kFirstLog, step.batch);
  journal_->log_previous(step);
  step.is_previous_logged = true;
}

void Engine::ensure_previous(Lock& lock, Step& step) {
  changed_.wait(lock, [&] { return !step.is_sorting || has_stopped(); });
  check_background();
  if (step.is_previous_logged) return;
  step.is_sorting = true;
  lock.unlock();
  log_previous(step);
  lock.lock();
  step.is_sorting = false;
}

// What a checkpoint made forget.
bool Engine::background_previous(Lock& lock) {
  if (journal_ == nullptr) return false;
  for (size_t i = 0; i < queue_.size() && i <= options_.lookahead; ++i) {
    const std::shared_ptr<Step> step = queue_[i];
    if (!step->is_sorted || step->is_sorting || !can_log_previous(*step)) continue;
    ensure_previous(lock, *step);
    changed_.notify_all();
    return true;
  }
  return false;
}

bool Engine::background_sort(Lock& lock) {
  if (is_fused_ && journal_ == nullptr) return false;
  for (size_t i = 0; i < queue_.size() && i <= options_.lookahead; ++i) {
    const std::shared_ptr<Step> step = queue_[i];
    if (step->is_sorted || step->is_sorting) continue;
    step->is_sorting = true;
    Traced traced(trace(), Phase::kSort, committed_ + 1 + i);
    lock.unlock();
    const Stopwatch watch;
    sort(*step, false);
    const uint64_t ns = watch.ns();
    traced.end();
    log_previous(*step);
    lock.lock();
    step->is_sorting = false;
    step->is_sorted = true;
    step->background_ns += ns;
    stats_.background_sort_ns += ns;
    changed_.notify_all();
    return true;
  }
  return false;
}

// Only the step that commits next and its successor are logged ahead: a row's undo value is known
// once every batch before the one in flight has committed.
bool Engine::background_log(Lock& lock) {
  if (is_fused_) return false;
  for (size_t i = 0; i < std::min<size_t>(queue_.size(), 2); ++i) {
    const std::shared_ptr<Step> step = queue_[i];
    const std::shared_ptr<Step> before = i == 0 ? nullptr : queue_[0];
    if (step->log != LogState::kNone || step->id == 0 || step->is_blocked) continue;
    if (!step->is_sorted || (before && (before->hand_off_closed || !before->is_sorted ||
                                        before->log == LogState::kNone)))
      return false;
    step->batch = committed_ + 1 + i;
    if (undo_.ring_bytes() == 0 || !begin_log(*step)) {
      step->is_blocked = true;  // the commit makes room
      return false;
    }
    const Stopwatch watch;
    Traced traced(trace(), Phase::kUndoLog, step->batch);
    if (before) {
      step->overlap_pending = true;
      lock.unlock();
      match_with_next(*before, *step);
      lock.lock();
      if (before->hand_off_closed) {
        // The update of `before` began meanwhile: wait for it, then every row is simply read.
        undo_.release_from(step->batch);
        step->log = LogState::kNone;
        step->overlap_pending = false;
        changed_.notify_all();
        return true;
      }
      before->is_next_mapped = true;
    }
    // Decided under the lock; the copy below must not see a commit clear it.
    const bool all = !step->overlap_pending || has_fault(Fault::kStaleOverlap);
    if (has_fault(Fault::kFlagBeforeRecords))
      undo_.set_flag(step->batch, life_, step->frame_offset, step->plan, false);
    lock.unlock();
    copy_rows(*step, all);
    const uint64_t ns = watch.ns();
    traced.end();
    lock.lock();
    step->background_ns += ns;
    step->log = LogState::kComplete;
    stats_.background_log_ns += ns;
    set_flag_if_complete(*step);
    changed_.notify_all();
    return true;
  }
  return false;
}

void Engine::background() {
  FloatMode float_mode;
  Trace::name_thread(Track::kLogWriter);
  Lock lock(mutex_);
  try {
    while (!stop_) {
      if (!is_paused_ && background_sort(lock)) continue;
      if (!is_paused_ && !options_.without_log && background_log(lock)) continue;
      if (!is_paused_ && background_early(lock)) continue;
      if (!is_paused_ && background_previous(lock)) continue;
      if (dense_.is_writing() && store_.slot()) {
        if (may_write_dense()) {
          background_dense(lock);
        } else {
          journal_->check();  // of one that failed nothing becomes durable: the generation waits in
                              // vain
          changed_.wait_for(lock, std::chrono::milliseconds(1));
        }
        continue;
      }
      changed_.wait(lock);
    }
  } catch (const std::exception& error) {
    if (!lock.owns_lock()) lock.lock();
    background_error_ = std::string(error.what(), std::strcspn(error.what(), "\n"));
    store_.poison(background_error_);
    if (journal_ != nullptr) journal_->abandon_checkpoint();
    changed_.notify_all();
  }
}

}  // namespace tcxl
