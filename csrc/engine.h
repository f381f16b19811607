// The device's engine (paper: computing logic and checkpointing logic of CXL-MEM): lookups, the
// background undo log of announced batches, the update, the commit. One trainer thread calls it;
// one background thread writes logs.
//
//   announce(N+1)           background: sort, undo records of rows that N does not change
//   lookup(N) ... prepare(N), the dense optimizer's step
//   commit(N)               wait for flag N; update rows, hand overlapping rows to the log of N+1;
//   slot
//
// Where the rest of the step is too short to hide the background's work, the update writes the undo
// records itself, block after block (a fused frame), and the workers sort.
//
// Nothing in the pool's tables changes outside commit().
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "dense_log.h"
#include "journal.h"
#include "relaxed_lookup.h"
#include "rewind.h"
#include "row_history.h"
#include "snapshot.h"
#include "step.h"
#include "stopwatch.h"
#include "store.h"
#include "undo_form.h"
#include "undo_log.h"
#include "workers.h"

namespace tcxl {

struct EngineOptions {
  int threads = 1;
  uint64_t lookahead = 1;
  uint64_t log_bytes = 0;           // ring size, 0: chosen from the batches
  uint64_t rows_per_batch_max = 0;  // 0: the log grows when a batch needs it
  UndoForm undo_form = UndoForm::kAuto;
  // Level power on a file: commits that may wait for a sync; first size of the ring, 0: by batches.
  uint64_t lag_max = 16;
  uint64_t journal_bytes = 0;
  // Dense generations kept beyond the last two.
  uint64_t keep_dense = Horizon::kAuto;
  bool is_relaxed = false;   // lookups of training: relaxed_lookup.h
  bool without_log = false;  // benchmarks: what training costs without durability
};

struct Stats {
  uint64_t batches = 0, lookups = 0, rows = 0, rows_handed_over = 0;
  uint64_t log_bytes = 0, dense_bytes = 0, unannounced = 0, log_growths = 0, fused = 0;
  uint64_t corrected_lookups = 0, late_lookups = 0;
  uint64_t early_wait_ns = 0, background_early_ns = 0;
  uint64_t lookup_ns = 0, flag_wait_ns = 0, update_ns = 0, commit_ns = 0, dense_wait_ns = 0;
  uint64_t background_log_ns = 0, background_sort_ns = 0, background_dense_ns = 0,
           dense_copy_ns = 0;
};

// What one lookup call read: an announced step's group, or a copy of its own.
struct Lookup {
  std::shared_ptr<Step> step;  // nullptr: not announced
  size_t index = 0;            // in step->groups
  GroupBatch own;
  const GroupBatch& batch() const { return step ? step->groups[index] : own; }
};

struct Part {
  std::shared_ptr<Lookup> lookup;
  const float* grad;  // [bags][stride of the group], contiguous
};

struct RowSettings {
  float learning_rate = 0, eps = 0;
};

class Engine {
 public:
  // journal: nullptr where the medium needs none.
  Engine(Store& store, UndoLog& undo, DenseLog& dense, Journal* journal, uint64_t committed,
         const EngineOptions& options);
  ~Engine();

  size_t add_group(const Group& group);
  const Group& group(size_t index) const { return groups_[index]; }

  // Hands the engine a later batch's indices; the log of it starts in the background. Returns its
  // id (1, 2, ...).
  uint64_t announce(const std::vector<GroupInput>& inputs);
  // Pooled rows of one group into out[bags][stride]. The indices are those of the oldest announced
  // step when they are equal bit for bit, else they are copied. Of a training batch: relaxed, where
  // the pool is.
  std::shared_ptr<Lookup> lookup(const GroupInput& input, float* out, bool is_training);
  // After an opening or a rewind, when the committed batch was trained with relaxed lookups: the
  // next lookup is corrected by its undo log. False: that is gone, the next lookup is strict.
  bool recall_previous();
  void per_sample_weight_grad(const Lookup& lookup, const float* grad, float* result);

  // Makes `parts` the step that commits next: announced steps up to id `through` that it does not
  // use are dropped. Checks the gradients. Every error leaves pool and queue as they were, or the
  // queue shorter.
  void prepare(const std::vector<Part>& parts, uint64_t through);
  // Norm of the summed gradients of the prepared step's rows: sum of squares.
  double grad_norm_sq();
  // Log, update, slot. Returns the committed batch. `settings`: one per table.
  uint64_t commit(const std::vector<RowSettings>& settings, float grad_scale,
                  const std::string& resume);
  // Same tables, another resume record (end of an epoch, finished).
  void commit_record(const std::string& resume);
  void drop_announced();  // forgets announced steps, e.g. when a loop is left

  // Dense generation of the committed batch: copied on return, written in the background.
  void capture(const std::string& resume, const std::vector<DenseLog::Part>& parts);
  void wait_dense();
  void set_dense_every(
      uint64_t batches);  // K: bounds how far the newest generation may lag (2K - 1)
  bool is_dense_due();
  void set_undo_form(UndoForm form);  // of the steps that have no undo record yet

  // A copy of the committed batch at `path`, made in the background. Its dense generation must be
  // complete. One at a time.
  void begin_snapshot(const std::string& path, const std::string& resume);
  Snapshot* snapshot() { return snapshot_.get(); }

  // What was announced is forgotten: its logs are in the way.
  std::vector<RewindPoint> rewind_points();
  // Makes the batch, one with a generation, the committed one. Every error before the first change
  // leaves the pool as it was.
  RecoveryReport rewind(uint64_t batch);

  uint64_t committed() const { return committed_; }
  uint64_t dense_batch();
  uint64_t log_used_bytes();
  Stats stats();
  Workers& workers() { return workers_; }
  // For a profile. What nobody takes beyond spans_max spans is dropped and counted.
  void start_trace(uint64_t spans_max);
  Trace& trace() { return store_.trace(); }

 private:
  using Lock = std::unique_lock<std::mutex>;
  // Of a resume record, for sizes; the journal's ring takes several frames with a longer one, too.
  static constexpr uint64_t kResumeUsual = 16 << 10;
  std::shared_ptr<Step> fresh_step();
  void add_tables(Step& step);
  uint64_t num_blocks(const GroupBatch& batch) const;
  void pool_block(const GroupBatch& batch, uint64_t block, float* out) const;
  void begin_early(Step& step);
  void take_early_blocks(Step& step);
  void cancel_early(Lock& lock, const Step* wanted);
  void finish_early(Lock& lock);
  void look_up_relaxed(const Lookup& lookup, float* out);
  void pool_late(const GroupBatch& batch, float* out);
  void sort(Step& step, bool parallel);
  bool begin_log(Step& step);
  void copy_rows(Step& step, bool all);
  void match_with_next(Step& step, Step& next);
  void set_flag_if_complete(Step& step);
  void reset_log_from(Lock& lock, size_t index);
  void drop_through(Lock& lock, uint64_t through);
  std::shared_ptr<Step> merge(const std::vector<Part>& parts);
  void ensure_sorted(Lock& lock, Step& step);
  void ensure_flag(Lock& lock, Step& step);
  void ensure_previous(Lock& lock, Step& step);
  bool can_log_previous(const Step& step) const;
  void log_previous(Step& step);
  void begin_checkpoint(Lock& lock);
  void admit(Lock& lock, Step& step);
  void make_room(Lock& lock);
  void admit_to_journal(Lock& lock, const Step& step);
  [[noreturn]] void fail_log_full(const char* log) const;
  void grow_log(uint64_t frame_bytes);
  void wait_for_generation(Lock& lock);
  void update(Step& step, const std::vector<RowSettings>& settings, float grad_scale,
              bool hand_over, const JournalFrame* frame);
  void plan_chunks(const Step& step);
  uint64_t log_block_rows(const Step& step, size_t t) const;
  [[noreturn]] void fail_damaged_row(const Table& table, uint64_t row);
  void check_commit(const std::string& resume) const;
  std::shared_ptr<Step> commit_prepared(const std::vector<RowSettings>& settings, float grad_scale,
                                        const std::string& resume);
  void advance_queue(const Step& step, bool hand_over);
  void count_batch(const Step& step, uint64_t slot_bytes);
  layout::Slot next_slot(uint64_t batch) const;
  void finish_generation();
  void detach_snapshot();
  void settle(Lock& lock);
  void background();
  bool background_sort(Lock& lock);
  bool background_log(Lock& lock);
  bool background_previous(Lock& lock);
  bool background_early(Lock& lock);
  void background_dense(Lock& lock);
  bool may_write_dense() const;
  void check_background() const;
  // The background thread has ended by an error: nothing it was to do will be done.
  bool has_stopped() const { return !background_error_.empty(); }

  Store& store_;
  UndoLog& undo_;
  DenseLog& dense_;
  Journal* journal_;
  EngineOptions options_;
  Workers workers_;
  std::vector<Group> groups_;
  std::vector<std::shared_ptr<Step>> all_steps_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Step>> queue_;  // front: the step that commits next
  uint64_t committed_;
  uint64_t life_ = 0;
  uint64_t next_id_ = 1;
  uint64_t dense_every_ = 1;
  uint64_t last_captured_ = 0;
  bool stop_ = false;
  bool is_paused_ = false;
  bool is_fused_ = false;  // the form in use
  PreviousRows previous_;
  std::shared_ptr<Step> early_;  // the background thread pools its bags
  FormChoice form_choice_{count_cpus()};
  std::string background_error_;
  Stats stats_;

  std::unique_ptr<Snapshot> snapshot_;
  bool is_snapshot_attached_ = false, is_updating_ = false;

  std::shared_ptr<Step> prepared_;
  std::vector<const float*> grads_;  // per group of the prepared step
  std::vector<std::vector<float>> merged_grads_;
  struct Chunk {
    size_t table;
    uint64_t row_begin, row_end;
  };
  std::vector<Chunk> chunks_;
  std::unique_ptr<RowHistory> history_;  // while a profile is taken
  UpdateTimes update_times_;             // of the newest update, then
  std::thread thread_;
};

}  // namespace tcxl
