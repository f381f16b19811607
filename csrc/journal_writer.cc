// The journal's threads: writing and syncing frames, cutting the ring, syncing the tables.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "crash_point.h"
#include "errors.h"
#include "fault.h"
#include "file_calls.h"
#include "journal.h"
#include "stopwatch.h"

namespace tcxl {

using namespace layout;

// Takes the frame's place in the ring; false when there is no room now.
bool Journal::plan(JournalFrame& frame, uint64_t ticket, Planned& planned) {
  const uint64_t bytes = frame.header.bytes, behind = ring_bytes_ - tail_;
  const bool is_split = tail_ < head_ || (tail_ == head_ && used() > 0);  // free: tail to head
  const bool skips = !is_split && bytes > behind;
  if (is_split && bytes > head_ - tail_ && !has_fault(Fault::kJournalRingOverrun)) return false;
  if (skips && bytes > head_) return false;
  if (checkpoint_.is_active && !checkpoint_.has_head && ticket >= checkpoint_.ticket) {
    checkpoint_.has_head = true;
    checkpoint_.head = tail_;
    checkpoint_.first_lsn = next_lsn_;
    checkpoint_.placed = placed_;
  }
  const uint64_t skipped = skips ? behind : 0;
  planned = {&frame, skips ? 0 : tail_, 0, tail_, skipped};
  if (skipped > 0) ++next_lsn_;
  planned.lsn = next_lsn_++;
  tail_ = planned.offset + bytes;
  placed_ += skipped + bytes;
  queued_bytes_ -= bytes;
  return true;
}

// Writes what is queued and has room, then one sync for all of it. False: nothing had room.
bool Journal::write_queue(Lock& lock) {
  std::vector<Planned> planned;
  uint64_t batch = durable_;
  for (const auto& frame : queue_) {
    Planned next;
    if (!plan(*frame, acked_ticket_ + 1 + planned.size(), next)) break;
    planned.push_back(next);
    if (frame->header.kind == static_cast<uint64_t>(JournalKind::kBatch))
      batch = frame->header.batch;
  }
  if (planned.empty()) return false;
  const uint64_t ring = file_.slot()->ring_offset, acked = acked_lsn_;
  lock.unlock();
  Traced writing(store_.trace(), Phase::kJournalWrite, batch);
  for (const Planned& p : planned) {
    if (p.skip_bytes > 0)
      file_.write_skip(ring + p.skip_offset, p.skip_bytes, p.lsn - 1, life_, acked);
    p.frame->header.lsn = p.lsn;
    p.frame->header.acked_lsn = acked;
    file_.write_frame(*p.frame, ring + p.offset);
  }
  writing.end();
  crash_point("journal: frames written");
  Traced syncing(store_.trace(), Phase::kJournalSync, batch);
  if (!has_fault(Fault::kJournalNoSync)) file_.sync();
  syncing.end();
  lock.lock();
  for (const Planned& p : planned) {
    stats_.journal_bytes += p.frame->header.bytes;
    free_.push_back(std::move(queue_.front()));
    queue_.pop_front();
  }
  acked_ticket_ += planned.size();
  acked_lsn_ = planned.back().lsn;
  durable_ = batch;
  ++stats_.journal_syncs;
  changed_.notify_all();
  return true;
}

bool Journal::can_cut() const {
  const bool is_data_synced =
      checkpoint_.is_data_synced || has_fault(Fault::kJournalCutBeforeTables);
  const bool is_dense_done = checkpoint_.is_dense_done || has_fault(Fault::kJournalCutBeforeDense);
  return checkpoint_.is_active && is_data_synced && is_dense_done &&
         acked_ticket_ + 1 >= checkpoint_.ticket;
}

// The tables and the dense part of the checkpoint's batch are durable: the ring before it may go.
void Journal::cut(Lock& lock) {
  if (!checkpoint_.has_head) {
    checkpoint_.head = tail_;
    checkpoint_.first_lsn = next_lsn_;
    checkpoint_.placed = placed_;
  }
  JournalSlot next = *file_.slot();
  next.base = checkpoint_.base;
  next.head = checkpoint_.head;
  next.first_lsn = checkpoint_.first_lsn;
  next.dense_batch = checkpoint_.slot.dense_batch;
  next.dense_life = checkpoint_.slot.dense_life;
  next.dense_area = checkpoint_.slot.dense_area;
  next.dense_crc = checkpoint_.slot.dense_crc;
  lock.unlock();
  file_.write_slot(next);
  lock.lock();
  head_ = next.head;
  head_placed_ = checkpoint_.placed;
  durable_ = std::max(durable_, next.base);
  checkpoint_.is_active = false;
  ++stats_.checkpoints;
  changed_.notify_all();
}

// Moves what the ring holds to the start of a larger one.
void Journal::grow(Lock& lock) {
  JournalSlot next = *file_.slot();
  const uint64_t old_offset = next.ring_offset, old_bytes = next.ring_bytes;
  const uint64_t live = used(), before_end = std::min(live, old_bytes - head_);
  next.ring_bytes = grow_to_;
  next.head = 0;
  lock.unlock();
  try {
    next.ring_offset = file_.allocate_ring(next.ring_bytes);
  } catch (const Error& error) {
    if (error.kind != ErrorKind::kFull) throw;
    lock.lock();
    grow_error_ = error.what();
    grow_to_ = 0;
    changed_.notify_all();
    return;
  }
  file_.copy(old_offset + head_, next.ring_offset, before_end);
  file_.copy(old_offset, next.ring_offset + before_end, live - before_end);
  if (has_fault(Fault::kJournalReleaseFirst)) file_.release(old_offset, old_bytes);
  if (!has_fault(Fault::kJournalNoGrowSync)) file_.sync();
  file_.write_slot(next);
  file_.release(old_offset, old_bytes);
  lock.lock();
  head_ = 0;
  tail_ = live;
  ring_bytes_ = next.ring_bytes;
  if (checkpoint_.has_head) checkpoint_.head = checkpoint_.placed - head_placed_;
  grow_to_ = 0;
  changed_.notify_all();
}

void Journal::note_failure(const std::string& what) {
  failure_ = what.substr(0, what.find('\n'));
  checkpoint_.is_active = false;
  store_.poison("its journal cannot be written: " + failure_);
  changed_.notify_all();
}

void Journal::run_writer() {
  Trace::name_thread(Track::kJournalWriter);
  Lock lock(mutex_);
  try {
    while (true) {
      if (!failure_.empty()) return;
      if (can_cut()) {
        cut(lock);
      } else if (grow_to_ > 0) {
        grow(lock);
      } else if (queue_.empty() || !write_queue(lock)) {
        if (stop_) return;
        const size_t queued = queue_.size();
        changed_.wait(lock, [&] {
          return stop_ || can_cut() || grow_to_ > 0 || !failure_.empty() || queue_.size() > queued;
        });
      }
    }
  } catch (const std::exception& error) {
    if (!lock.owns_lock()) lock.lock();
    note_failure(error.what());
  }
}

// Syncs the tables for a checkpoint. May take seconds; nothing but the cut of the ring waits for
// it.
void Journal::run_data_sync() {
  Trace::name_thread(Track::kTableSync);
  Lock lock(mutex_);
  auto is_wanted = [&] { return checkpoint_.is_active && !checkpoint_.is_data_synced; };
  while (true) {
    changed_.wait(lock, [&] { return stop_ || !failure_.empty() || is_wanted(); });
    if (stop_ || !failure_.empty()) return;
    lock.unlock();
    const Stopwatch watch;
    Traced traced(store_.trace(), Phase::kTableSync, 0);
    crash_point("data: sync");
    const int error = sync_file_data(store_.data().fd()) == 0 ? 0 : errno;
    traced.end();
    crash_point("data: synced");
    lock.lock();
    stats_.data_sync_ns += watch.ns();
    if (error != 0) {
      store_.distrust();
      note_failure(text("a sync of '", store_.path(), "/data' failed: ", std::strerror(error)));
    } else {
      checkpoint_.is_data_synced = true;
      changed_.notify_all();
    }
  }
}

}  // namespace tcxl
