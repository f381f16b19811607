#include "trace.h"

#include <chrono>
#include <utility>

namespace tcxl {

namespace {

thread_local Track t_track = Track::kTrainer;

}  // namespace

const char* phase_name(Phase phase) {
  switch (phase) {
    case Phase::kAnnounce:
      return "announce";
    case Phase::kLookup:
      return "lookup";
    case Phase::kCorrect:
      return "correct";
    case Phase::kPrepare:
      return "prepare";
    case Phase::kCommit:
      return "commit";
    case Phase::kSort:
      return "sort";
    case Phase::kJournalWait:
      return "journal_wait";
    case Phase::kFlagWait:
      return "flag_wait";
    case Phase::kDenseWait:
      return "dense_wait";
    case Phase::kEarlyWait:
      return "early_wait";
    case Phase::kUpdate:
      return "update";
    case Phase::kDenseCapture:
      return "dense_capture";
    case Phase::kCount:
      return "profile";
    case Phase::kUndoLog:
      return "undo_log";
    case Phase::kEarlyLookup:
      return "early_lookup";
    case Phase::kFirstLog:
      return "first_log";
    case Phase::kDenseLog:
      return "dense_log";
    case Phase::kJournalWrite:
      return "journal_write";
    case Phase::kJournalSync:
      return "journal_sync";
    case Phase::kTableSync:
      return "table_sync";
  }
  return "unknown";
}

const char* track_name(Track track) {
  switch (track) {
    case Track::kTrainer:
      return "trainer";
    case Track::kLogWriter:
      return "log writer";
    case Track::kJournalWriter:
      return "journal writer";
    case Track::kTableSync:
      return "table sync";
  }
  return "unknown";
}

void Trace::start(uint64_t spans_max) {
  const std::lock_guard lock(mutex_);
  taken_ = {};
  taken_.spans.reserve(spans_max);
  spans_max_ = spans_max;
  is_on_ = true;
}

void Trace::stop() {
  const std::lock_guard lock(mutex_);
  is_on_ = false;
}

void Trace::add(const TraceSpan& span) {
  const std::lock_guard lock(mutex_);
  if (!is_on_) return;  // it ended meanwhile
  if (taken_.spans.size() < spans_max_) {
    taken_.spans.push_back(span);
  } else {
    ++taken_.dropped;
  }
}

void Trace::add(const BatchCounts& counts) {
  const std::lock_guard lock(mutex_);
  if (taken_.counts.size() < spans_max_) {
    taken_.counts.push_back(counts);
  } else {
    ++taken_.dropped;
  }
}

Trace::Taken Trace::take() {
  Taken found;
  found.spans.reserve(spans_max_);
  const std::lock_guard lock(mutex_);
  std::swap(found, taken_);
  return found;
}

void Trace::name_thread(Track track) { t_track = track; }
Track Trace::this_thread() { return t_track; }

uint64_t Trace::now() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

}  // namespace tcxl
