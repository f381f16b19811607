// Level power on an ordinary file (docs/format.md, "Journal"). The kernel may write a table's page
// back at any moment and must not be told to: that costs a random write a page. So a journal makes
// batches durable with sequential writes, off the critical path:
//   - the bytes a row held at the base, before its first change since (logged when its batch is
//     announced; durable before the row changes),
//   - the bytes of every row after each batch (copied by the update, written behind it).
// From time to time the tables are synced in the background: the base moves up and the ring is cut.
// The undo log stays what it is and covers the death of the process.
//
// Threads: the trainer and the engine's background thread append frames; the writer writes and
// syncs them in that order; the data thread syncs the tables.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "journal_file.h"
#include "step.h"
#include "store.h"

namespace tcxl {

struct JournalStats {
  uint64_t journal_bytes = 0, journal_syncs = 0, checkpoints = 0, rows_previous = 0;
  uint64_t previous_wait_ns = 0, lag_wait_ns = 0, data_sync_ns = 0;
};

class Journal {
 public:
  explicit Journal(Store& store);
  ~Journal();  // writes and syncs what was appended, unless the medium failed

  const JournalFile& file() const { return file_; }
  bool has_base() const { return file_.slot().has_value(); }
  // Makes all that the pool's files hold durable and the base, at the slot's batch. Nothing may be
  // in flight.
  void rebase(const layout::Slot& slot);

  // Logs the bytes of the step's rows that change for the first time since the base, and notes in
  // the step what must be durable before its update. Any thread; the step's own sort is done.
  void log_previous(Step& step);
  // Waits until the step's rows may change, and for the bound on lag. Throws when a sync failed.
  void wait_before_update(const Step& step, uint64_t batch);
  // The frame whose columns take the rows of the step after its update.
  JournalFrame& begin_batch(const Step& step);
  void commit_batch(JournalFrame& frame, uint64_t batch, const std::string& resume);
  void commit_record(uint64_t batch, const std::string& resume);
  void wait_durable();  // of everything that was appended
  void settle();        // and of the checkpoint in hand: until there is nothing left to do
  uint64_t life() const { return life_; }
  uint64_t durable_batch();
  void check();  // throws when the medium failed
  // lag_max: commits that may wait for their sync. ring_bytes: first size, 0: by the batches.
  // lookahead: batches that are announced ahead.
  void configure(uint64_t lag_max, uint64_t ring_bytes, uint64_t lookahead);

  // A ring with room for many frames of this size. kFull: it could not be had; nothing changed.
  void ensure_ring(uint64_t frame_bytes);
  bool fits(uint64_t frame_bytes);  // ensure_ring would do nothing
  // For all that one more batch brings, up to the next chance to begin a checkpoint.
  bool has_room(uint64_t frame_bytes);
  bool wants_checkpoint();
  bool needs_checkpoint();  // the batch after the next might find no room
  bool is_checkpointing();
  // The base is to move to `batch`, which is committed while no update runs. From now on every row
  // counts as not changed since the base.
  void begin_checkpoint(uint64_t batch);
  void abandon_checkpoint();  // nobody writes its generation any more: who waits for it goes on
  void generation_finished(const layout::Slot& slot);  // the slot names it
  JournalStats stats();

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct Checkpoint {
    bool is_active = false, is_data_synced = false, is_dense_done = false, has_head = false;
    uint64_t base = 0, ticket = 0;
    uint64_t appended = 0;  // bytes of all frames before it
    uint64_t head = 0, first_lsn = 0, placed = 0;
    layout::Slot slot{};
  };
  struct Planned {
    JournalFrame* frame;
    uint64_t offset, lsn;
    uint64_t skip_offset, skip_bytes;  // 0 bytes: nothing is skipped before it
  };
  void write_base(const layout::Slot& slot);
  std::unique_ptr<JournalFrame> take_frame();
  uint64_t append(std::unique_ptr<JournalFrame> frame);
  bool plan(JournalFrame& frame, uint64_t ticket, Planned& planned);
  bool can_cut() const;
  void cut(Lock& lock);
  void grow(Lock& lock);
  bool write_queue(Lock& lock);
  void note_failure(const std::string& what);
  void run_writer();
  void run_data_sync();
  uint64_t used() const { return placed_ - head_placed_; }
  uint64_t appended() const { return placed_ + queued_bytes_; }
  uint64_t claimed() const { return appended() - head_placed_; }  // and what waits for its place
  uint64_t frames_min() const;
  uint64_t margin() const;
  bool is_checkpoint_needed() const;

  Store& store_;
  JournalFile file_;
  uint64_t lag_max_ = 16, first_ring_bytes_ = 0, lookahead_ = 1;

  // Rows with previous bytes in the ring, a bit each; allocated for tables that change.
  struct Bits {
    struct Free {
      void operator()(uint64_t* p) const { std::free(p); }
    };
    std::unique_ptr<uint64_t, Free> words;
  };
  std::mutex touch_mutex_;  // marking, copying and appending are one; taken before mutex_
  std::vector<Bits> touched_;
  std::vector<uint64_t> first_rows_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::unique_ptr<JournalFrame>> queue_;  // tickets acked + 1 ... newest
  std::deque<std::unique_ptr<JournalFrame>> free_;   // taken from the front
  uint64_t frames_made_ = 0;
  std::unique_ptr<JournalFrame> batch_;  // between begin_batch and commit_batch
  uint64_t next_id_ = 1, newest_ticket_ = 0, acked_ticket_ = 0;
  uint64_t previous_ticket_ = 0;  // newest frame with previous bytes
  uint64_t life_ = 0, next_lsn_ = 1, acked_lsn_ = 0, durable_ = 0;
  uint64_t head_ = 0, tail_ = 0, ring_bytes_ = 0;
  uint64_t placed_ = 0, head_placed_ = 0;  // bytes ever placed; at the head
  uint64_t queued_bytes_ = 0;              // of frames that have no place yet
  uint64_t frame_bytes_max_ = 0;
  uint64_t grow_to_ = 0;
  std::string grow_error_, failure_;
  Checkpoint checkpoint_;
  JournalStats stats_;
  bool stop_ = false;
  std::thread writer_, data_thread_;
};

}  // namespace tcxl
