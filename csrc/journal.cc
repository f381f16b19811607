#include "journal.h"

#include <algorithm>
#include <cstring>

#include "errors.h"
#include "fault.h"
#include "stopwatch.h"

namespace tcxl {

using namespace layout;

namespace {

constexpr uint64_t kQueueMax = 4;       // batches whose frames wait in memory
constexpr uint64_t kFramesUsed = 6;     // at least, before a checkpoint is needed
constexpr uint64_t kFramesUsual = 256;  // ... usually, within the next two bounds
constexpr uint64_t kRingBytesMin = 64 << 20;
constexpr uint64_t kRingBytesUsual = 1 << 30;

}  // namespace

Journal::Journal(Store& store) : store_(store), file_(store) {
  if (store.is_read_only()) return;
  writer_ = std::thread([this] { run_writer(); });
  data_thread_ = std::thread([this] { run_data_sync(); });
}

Journal::~Journal() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (writer_.joinable()) writer_.join();
  if (data_thread_.joinable()) data_thread_.join();
}

void Journal::rebase(const Slot& slot) {
  const std::lock_guard touch(touch_mutex_);
  const std::lock_guard lock(mutex_);
  for (Bits& bits : touched_) bits.words.reset();
  TCXL_ASSERT(queue_.empty() && !checkpoint_.is_active);
  if (!has_fault(Fault::kJournalResetBeforeSync)) store_.sync_all();
  try {
    write_base(slot);
  } catch (const Error& error) {
    note_failure(error.what());
    throw;
  }
}

void Journal::write_base(const Slot& slot) {
  // After a failed sync the slot may stand in memory alone, over one that is no base any more: the
  // next one must not take the place of the only true one on the medium.
  if (store_.had_failed_sync() && file_.slot()) file_.put_slot(*file_.slot());
  JournalSlot next = file_.slot().value_or(JournalSlot{});
  ++next.life;
  next.base = slot.batch;
  next.head = 0;
  next.first_lsn = 1;
  next.pool_life = slot.life;
  next.dense_batch = slot.dense_batch;
  next.dense_life = slot.dense_life;
  next.dense_area = slot.dense_area;
  next.dense_crc = slot.dense_crc;
  file_.write_slot(next);
  if (has_fault(Fault::kJournalResetBeforeSync)) store_.sync_all();
  life_ = next.life;
  next_lsn_ = 1;
  acked_lsn_ = 0;
  durable_ = slot.batch;
  head_ = tail_ = placed_ = head_placed_ = queued_bytes_ = 0;
  ring_bytes_ = next.ring_bytes;
}

// --- frames

std::unique_ptr<JournalFrame> Journal::take_frame() {
  // As many as there ever are at once, and in turn: so a training takes all its memory in its first
  // batches, not when a slow sync first needs one frame more. Those that wait in the queue, the one
  // of the batch, previous bytes of it and of the lookahead + 1 behind it, and a record.
  Lock lock(mutex_);
  for (; frames_made_ < kQueueMax + lookahead_ + 3 || free_.empty(); ++frames_made_)
    free_.push_back(std::make_unique<JournalFrame>());
  std::unique_ptr<JournalFrame> frame = std::move(free_.front());
  free_.pop_front();
  frame->header.id = next_id_++;
  const uint64_t bytes = frame_bytes_max_;
  lock.unlock();
  frame->bytes.reserve(bytes + kResumeBytesMax);
  frame->plan.segments.clear();
  frame->plan.bytes = frame->plan.records = 0;
  return frame;
}

uint64_t Journal::append(std::unique_ptr<JournalFrame> frame) {
  const std::lock_guard lock(mutex_);
  queued_bytes_ += frame->header.bytes;
  queue_.push_back(std::move(frame));
  changed_.notify_all();
  return ++newest_ticket_;
}

void Journal::log_previous(Step& step) {
  const std::lock_guard touch(touch_mutex_);
  auto frame = take_frame();
  touched_.resize(store_.tables().size());
  std::vector<uint64_t>& rows = first_rows_;
  rows.clear();
  for (size_t t = 0; t < step.num_tables; ++t) {
    const StepTable& table = step.tables[t];
    const TableView& view = store_.tables()[table.table].view;
    Bits& bits = touched_[table.table];
    if (bits.words == nullptr) {
      // calloc: pages of rows that never change cost nothing.
      bits.words.reset(static_cast<uint64_t*>(std::calloc(view.rows / 64 + 1, sizeof(uint64_t))));
      if (bits.words == nullptr)
        fail_os(ENOMEM, text("no memory for a bit a row of table '",
                             store_.tables()[table.table].name, "'"));
    }
    const size_t before = rows.size();
    for (const uint64_t row : table.lookups.rows) {
      uint64_t& word = bits.words.get()[row / 64];
      const uint64_t bit = 1ull << (row % 64);
      if ((word & bit) == 0) rows.push_back(row);
      word |= bit;
    }
    if (rows.size() > before) add_segment(frame->plan, table.table, view, rows.size() - before);
  }
  if (rows.empty()) {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(frame));
  } else {
    frame->open(store_, JournalKind::kPrevious, life_, frame->header.id);
    uint64_t first = 0;
    for (size_t s = 0; s < frame->columns.size(); ++s) {
      const FrameSegment& segment = frame->plan.segments[s];
      copy_rows_to_log(store_.tables()[segment.table].view, rows.data() + first, nullptr,
                       segment.count, frame->columns[s], nullptr);
      first += segment.count;
    }
    Persistence::fence();  // another thread reads the streamed stores
    frame->close(store_, 0, "");
    previous_ticket_ = append(std::move(frame));
    const std::lock_guard lock(mutex_);
    stats_.rows_previous += rows.size();
  }
  step.previous_ticket = previous_ticket_;
}

JournalFrame& Journal::begin_batch(const Step& step) {
  if (batch_ == nullptr) batch_ = take_frame();
  batch_->plan.segments.clear();
  batch_->plan.records = 0;
  for (size_t t = 0; t < step.num_tables; ++t) {
    const StepTable& table = step.tables[t];
    if (table.lookups.num_rows() == 0) continue;
    add_segment(batch_->plan, table.table, store_.tables()[table.table].view,
                table.lookups.num_rows());
  }
  batch_->open(store_, JournalKind::kBatch, life_, batch_->header.id);
  return *batch_;
}

void Journal::commit_batch(JournalFrame& frame, uint64_t batch, const std::string& resume) {
  TCXL_ASSERT(&frame == batch_.get());
  frame.close(store_, batch, resume);
  append(std::move(batch_));
}

void Journal::commit_record(uint64_t batch, const std::string& resume) {
  check();
  auto frame = take_frame();
  frame->open(store_, JournalKind::kBatch, life_, frame->header.id);
  frame->close(store_, batch, resume);
  append(std::move(frame));
}

// --- waiting

void Journal::check() {
  const std::lock_guard lock(mutex_);
  if (failure_.empty()) return;
  fail(ErrorKind::kPool, "the journal of pool '", store_.path(), "' cannot be written: ", failure_,
       "\n  state: batch ", durable_,
       " is durable, later ones are not known to be\n  do:    free space or replace the medium, "
       "then open the pool again; it recovers");
}

void Journal::wait_before_update(const Step& step, uint64_t batch) {
  Lock lock(mutex_);
  const Stopwatch previous;
  changed_.wait(lock, [&] {
    return acked_ticket_ >= step.previous_ticket || !failure_.empty() ||
           has_fault(Fault::kJournalNoPreviousWait);
  });
  stats_.previous_wait_ns += previous.ns();
  const Stopwatch lag;
  changed_.wait(lock, [&] {
    // What a checkpoint leaves in the ring must have room for the next one to begin.
    const bool has_room = !checkpoint_.is_active || has_fault(Fault::kJournalRingOverrun) ||
                          appended() - checkpoint_.appended + margin() <= ring_bytes_;
    return (batch - durable_ <= lag_max_ && queue_.size() < kQueueMax && has_room) ||
           !failure_.empty();
  });
  stats_.lag_wait_ns += lag.ns();
  lock.unlock();
  check();
}

void Journal::wait_durable() {
  Lock lock(mutex_);
  const uint64_t ticket = newest_ticket_;
  changed_.wait(lock, [&] { return acked_ticket_ >= ticket || !failure_.empty(); });
  lock.unlock();
  check();
}

void Journal::settle() {
  wait_durable();
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return !checkpoint_.is_active || !failure_.empty(); });
  lock.unlock();
  check();
}

void Journal::configure(uint64_t lag_max, uint64_t ring_bytes, uint64_t lookahead) {
  const std::lock_guard lock(mutex_);
  lookahead_ = lookahead;
  lag_max_ = std::max<uint64_t>(1, lag_max);
  first_ring_bytes_ = ring_bytes;
}

uint64_t Journal::durable_batch() {
  const std::lock_guard lock(mutex_);
  return durable_;
}

JournalStats Journal::stats() {
  const std::lock_guard lock(mutex_);
  return stats_;
}

// --- space
//
// From the admission of a batch until a checkpoint may begin after it, frames are appended that
// nothing frees: previous bytes of it and of the lookahead + 1 batches behind it, its own frame, a
// record, the rest of the ring that a frame does not fit into. From the end of one batch until the
// admission of the next: previous bytes again, and a record. Each is no larger than the largest
// frame. So a checkpoint is asked for while there is room for both.

uint64_t Journal::margin() const { return (2 * lookahead_ + 8) * frame_bytes_max_; }

uint64_t Journal::frames_min() const { return 2 * lookahead_ + 8 + kFramesUsed; }

bool Journal::is_checkpoint_needed() const {
  return !checkpoint_.is_active && claimed() > 0 && claimed() + margin() > ring_bytes_;
}

void Journal::ensure_ring(uint64_t frame_bytes) {
  Lock lock(mutex_);
  const auto is_enough = [&] { return frames_min() * frame_bytes <= ring_bytes_; };
  if (is_enough()) {
    frame_bytes_max_ = std::max(frame_bytes_max_, frame_bytes);
    return;
  }
  const uint64_t usual = std::min(kFramesUsual * frame_bytes, kRingBytesUsual);
  const uint64_t wanted =
      first_ring_bytes_ > 0 ? first_ring_bytes_ : std::max(kRingBytesMin, usual);
  grow_to_ = round_up(std::max(wanted, 3 * frames_min() / 2 * frame_bytes), kPage);
  grow_error_.clear();
  changed_.notify_all();
  changed_.wait(lock, [&] { return grow_to_ == 0 || !failure_.empty(); });
  const std::string error = grow_error_;
  if (is_enough()) frame_bytes_max_ = std::max(frame_bytes_max_, frame_bytes);
  lock.unlock();
  if (!error.empty()) fail(ErrorKind::kFull, error);
  check();
}

bool Journal::fits(uint64_t frame_bytes) {
  const std::lock_guard lock(mutex_);
  return frames_min() * frame_bytes <= ring_bytes_;
}

bool Journal::has_room(uint64_t frame_bytes) {
  const std::lock_guard lock(mutex_);
  return claimed() + (lookahead_ + 5) * frame_bytes <= ring_bytes_;
}

bool Journal::wants_checkpoint() {
  const std::lock_guard lock(mutex_);
  const bool is_half_full = claimed() > 0 && 2 * claimed() >= ring_bytes_;
  return is_checkpoint_needed() || (!checkpoint_.is_active && is_half_full);
}

bool Journal::needs_checkpoint() {
  const std::lock_guard lock(mutex_);
  return is_checkpoint_needed();
}

bool Journal::is_checkpointing() {
  const std::lock_guard lock(mutex_);
  return checkpoint_.is_active;
}

void Journal::begin_checkpoint(uint64_t batch) {
  const std::lock_guard touch(touch_mutex_);
  const std::lock_guard lock(mutex_);
  TCXL_ASSERT(!checkpoint_.is_active);
  for (Bits& bits : touched_) {
    if (!has_fault(Fault::kJournalBitsKept)) bits.words.reset();
  }
  checkpoint_ = {};
  checkpoint_.is_active = true;
  checkpoint_.base = batch;
  checkpoint_.ticket = newest_ticket_ + 1;
  checkpoint_.appended = appended();
  changed_.notify_all();
}

void Journal::abandon_checkpoint() {
  const std::lock_guard lock(mutex_);
  checkpoint_.is_active = false;
  changed_.notify_all();
}

void Journal::generation_finished(const Slot& slot) {
  const std::lock_guard lock(mutex_);
  if (!checkpoint_.is_active || slot.dense_batch < checkpoint_.base) return;
  checkpoint_.is_dense_done = true;
  checkpoint_.slot = slot;
  changed_.notify_all();
}

}  // namespace tcxl
