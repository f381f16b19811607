// The commit: rows change here and nowhere else (protocol: docs/format.md, "A commit, step by
// step").
#include <algorithm>
#include <atomic>
#include <cstring>

#include "crash_point.h"
#include "engine.h"
#include "errors.h"
#include "fault.h"
#include "stopwatch.h"

namespace tcxl {

namespace {

// A flag that is up until the end of the scope.
struct Raised {
  explicit Raised(bool& f) : flag(f) { flag = true; }
  ~Raised() { flag = false; }
  Raised(const Raised&) = delete;
  Raised& operator=(const Raised&) = delete;
  bool& flag;
};

constexpr uint64_t kLookupsPerChunk = 8192;
constexpr uint64_t kWorthSharing = 4096;  // lookups; below, waking threads costs more

}  // namespace

// Bounds what "exact" has to do again: before batch n commits, every generation up to n - 2K + 1 is
// complete.
void Engine::wait_for_generation(Lock& lock) {
  if (!dense_.is_writing()) return;
  const Stopwatch watch;
  const Traced traced(trace(), Phase::kDenseWait, committed_ + 1);
  changed_.wait(lock, [&] {
    const uint64_t newest = dense_.newest() ? dense_.newest()->header.batch : 0;
    return !dense_.is_writing() || newest + 2 * dense_every_ > committed_ + 1 || has_stopped();
  });
  check_background();
  stats_.dense_wait_ns += watch.ns();
}

uint64_t Engine::log_block_rows(const Step& step, size_t t) const {
  const Table& table = store_.tables()[step.tables[t].table];
  return layout::fused_block_rows(static_cast<uint64_t>(table.view.dim));
}

// Row ranges of about equal numbers of lookups; the split does not change a bit.
void Engine::plan_chunks(const Step& step) {
  chunks_.clear();
  for (size_t t = 0; t < step.num_tables; ++t) {
    const TableLookups& lookups = step.tables[t].lookups;
    const uint64_t rows = lookups.num_rows();
    for (uint64_t begin = 0; begin < rows;) {
      const auto from = lookups.begin.begin() + static_cast<int64_t>(begin);
      const auto to = std::upper_bound(from + 1, lookups.begin.end(), *from + kLookupsPerChunk);
      uint64_t end = std::max(begin + 1, static_cast<uint64_t>(to - lookups.begin.begin()) - 1);
      if (step.is_fused) end = layout::round_up(end, log_block_rows(step, t));
      end = std::min(rows, end);
      chunks_.push_back({t, begin, end});
      begin = end;
    }
  }
}

void Engine::update(Step& step, const std::vector<RowSettings>& settings, float grad_scale,
                    bool hand_over, const JournalFrame* frame) {
  if (is_snapshot_attached_) snapshot_->begin_update();
  plan_chunks(step);
  const bool is_timed = trace().is_on();
  std::atomic<uint64_t> log_ns = 0, reduce_ns = 0, all_ns = 0;
  std::atomic<const Chunk*> damaged = nullptr;
  uint64_t damaged_row = 0;
  std::vector<const RecordColumns*> after(step.num_tables, nullptr);
  size_t segment = 0;
  for (size_t t = 0; t < step.num_tables && frame != nullptr; ++t) {
    if (step.tables[t].lookups.num_rows() > 0) after[t] = &frame->columns[segment++];
  }
  Step* next = hand_over ? queue_[1].get() : nullptr;
  workers_.run(
      chunks_.size(),
      [&](uint64_t i) {
        const Chunk& chunk = chunks_[i];
        const StepTable& table = step.tables[chunk.table];
        UpdateJob job;
        job.table = store_.tables()[table.table].view;
        job.lookups = &table.lookups;
        job.grad = grads_[table.group];
        job.learning_rate = settings[table.table].learning_rate;
        job.eps = settings[table.table].eps;
        job.grad_scale = grad_scale;
        job.flush = store_.persistence().flush_function();
        job.fence = &Persistence::fence;
        job.after = after[chunk.table];
        if (step.is_fused) {
          job.log_block_rows = log_block_rows(step, chunk.table);
          job.own_log = table.columns;
        }
        const StepTable* follower = next != nullptr ? next->find(table.table) : nullptr;
        if (follower != nullptr && !has_fault(Fault::kStaleOverlap)) {
          job.next_log = follower->columns;
          job.next_record = table.next_record.data();
        }
        constexpr uint64_t kNone = ~0ull;
        uint64_t bad_row = kNone;
        job.damaged_row = &bad_row;
        UpdateTimes times;
        if (is_timed) job.times = &times, job.clock = &Trace::now;
        update_rows(job, chunk.row_begin, chunk.row_end);
        if (is_timed) log_ns += times.log_ns, reduce_ns += times.reduce_ns, all_ns += times.all_ns;
        const Chunk* none = nullptr;
        if (bad_row != kNone && damaged.compare_exchange_strong(none, &chunk))
          damaged_row = bad_row;
        if (!has_fault(Fault::kNoRowFence)) store_.persistence().fence();
      },
      step.num_lookups() >= kWorthSharing);
  update_times_ = {log_ns, reduce_ns, all_ns};
  if (damaged != nullptr)
    fail_damaged_row(store_.tables()[step.tables[damaged.load()->table].table], damaged_row);
}

void Engine::fail_damaged_row(const Table& table, uint64_t row) {
  const std::string what =
      text("row ", row, " of table '", table.name, "' is damaged: its checksum is of other bytes");
  store_.poison(what);
  store_.note_told();
  fail(ErrorKind::kCorrupted, what, "\n  where: '", store_.data().path(), "', byte ",
       table.record.weight_offset + row * table.record.dim * sizeof(float), "\n  state: batch ",
       committed_ + 1,
       " is not committed; opening the pool again takes it back\n  do:    "
       "'trainingcxl verify ",
       store_.path(), "' lists the damage; restore from a snapshot");
}

layout::Slot Engine::next_slot(uint64_t batch) const {
  layout::Slot slot{};
  slot.batch = batch;
  slot.life = life_;
  slot.dense_batch = layout::kNoBatch;
  if (dense_.newest()) name_generation(slot, *dense_.newest());
  return slot;
}

uint64_t Engine::commit(const std::vector<RowSettings>& settings, float grad_scale,
                        const std::string& resume) {
  const std::shared_ptr<Step> step = commit_prepared(settings, grad_scale, resume);
  if (trace().is_on()) count_batch(*step, sizeof(layout::Slot) + resume.size());
  return committed_;
}

void Engine::check_commit(const std::string& resume) const {
  store_.check_alive();
  check_background();
  if (!store_.slot())
    fail(ErrorKind::kPool, "batch 0 of pool '", store_.path(),
         "' was never committed\n  do:    make a FaultTolerantRun first: it commits batch 0");
  if (!prepared_ || queue_.empty() || queue_.front() != prepared_)
    fail(ErrorKind::kPool, "no step is prepared");
  if (resume.size() > layout::kResumeBytesMax)
    fail(ErrorKind::kFull, "the resume record has ", resume.size(), " bytes, at most ",
         layout::kResumeBytesMax,
         " fit\n  do:    keep large state in the model or optimizer, not in `state` objects");
}

// With the engine's mutex held: the step behind the committed one is the next.
void Engine::advance_queue(const Step& step, bool hand_over) {
  if (is_snapshot_attached_) snapshot_->take_records(step);
  queue_.pop_front();
  prepared_.reset();
  if (hand_over) {
    for (const StepTable& table : step.tables) {
      for (const uint32_t record : table.next_record)
        stats_.rows_handed_over += record != kNoRecord ? 1 : 0;
    }
  }
  if (!queue_.empty()) {
    queue_.front()->overlap_pending = false;
    queue_.front()->is_blocked = false;
    set_flag_if_complete(*queue_.front());
  }
}

std::shared_ptr<Step> Engine::commit_prepared(const std::vector<RowSettings>& settings,
                                              float grad_scale, const std::string& resume) {
  const Stopwatch whole;
  const Traced traced(trace(), Phase::kCommit, committed_ + 1);
  Lock lock(mutex_);
  check_commit(resume);
  const std::shared_ptr<Step> step = prepared_;
  ensure_sorted(lock, *step);
  JournalFrame* frame = nullptr;
  if (journal_ != nullptr) {
    ensure_previous(lock, *step);
    TCXL_ASSERT(step->is_previous_logged);
    lock.unlock();
    Traced waiting(trace(), Phase::kJournalWait, committed_ + 1);
    journal_->wait_before_update(*step, committed_ + 1);
    waiting.end();
    frame = &journal_->begin_batch(*step);
    lock.lock();
  }
  ensure_flag(lock, *step);
  wait_for_generation(lock);
  finish_early(lock);
  const bool hand_over = queue_.size() > 1 && step->is_next_mapped;
  if (!hand_over) step->hand_off_closed = true;

  const Raised updating(is_updating_);
  lock.unlock();
  Stopwatch watch;
  crash_point("commit: flag set");
  if (has_fault(Fault::kSlotBeforeRows)) store_.write_slot(next_slot(committed_ + 1), resume);
  Traced updating_rows(trace(), Phase::kUpdate, committed_ + 1);
  update(*step, settings, grad_scale, hand_over, frame);
  updating_rows.end();
  crash_point("commit: rows stored");
  if (has_fault(Fault::kStrayStore)) ++*store_.data().at<uint32_t>(store_.data().bytes() - 8);
  const uint64_t update_ns = watch.ns();
  lock.lock();

  watch = Stopwatch();
  store_.write_slot(next_slot(committed_ + 1), resume);
  ++committed_;
  if (frame != nullptr) journal_->commit_batch(*frame, committed_, resume);
  if (options_.is_relaxed) previous_.take(*step);
  advance_queue(*step, hand_over);
  if (options_.without_log) undo_.reclaim(committed_);
  ++stats_.batches;
  stats_.rows += step->num_rows();
  stats_.update_ns += update_ns;
  stats_.commit_ns += watch.ns();
  form_choice_.busy_ns() += whole.ns();
  if (options_.undo_form == UndoForm::kAuto) {
    form_choice_.note_commit(step->num_rows(), step->background_ns);
    // Beside a journal the background sorts and reads the rows anyway: only time counts.
    is_fused_ = journal_ != nullptr ? !form_choice_.is_step_long() : form_choice_.is_fused();
  }
  changed_.notify_all();
  return step;
}

void Engine::commit_record(const std::string& resume) {
  Lock lock(mutex_);
  store_.write_slot(next_slot(committed_), resume);
  if (journal_ != nullptr) journal_->commit_record(committed_, resume);
}

}  // namespace tcxl
