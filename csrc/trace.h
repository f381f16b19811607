// When each phase of the step and of the background threads ran, for a profile. Off, a phase costs
// one branch; on, two readings of the clock and a short lock. Bounded: what nobody takes is counted
// and dropped. The clock is the monotonic one, as Python's time.perf_counter_ns has it.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

namespace tcxl {

enum class Phase : uint32_t {
  // The trainer's, in a step's order.
  kAnnounce,
  kLookup,
  kCorrect,  // relaxed lookup: copy of what was pooled early, and its correction
  kPrepare,
  kCommit,
  kSort,  // of the log writer, too
  kJournalWait,
  kFlagWait,
  kDenseWait,
  kEarlyWait,  // the commit's share of the early lookup of the batch behind it
  kUpdate,
  kDenseCapture,
  kCount,  // rows that recur: the profile's own work
  // The background threads'.
  kUndoLog,
  kEarlyLookup,
  kFirstLog,  // bytes that rows held at the journal's base
  kDenseLog,
  kJournalWrite,
  kJournalSync,
  kTableSync,
};

// Who ran it. A thread says once which it is; every other one is the trainer.
enum class Track : uint32_t { kTrainer, kLogWriter, kJournalWriter, kTableSync };

const char* phase_name(Phase phase);
const char* track_name(Track track);

struct TraceSpan {
  Phase phase;
  Track track;
  uint64_t batch;  // 0: of no batch
  uint64_t begin_ns, end_ns;
};

// What one committed batch moved. Shares of the update's time are of the sampled blocks of rows.
struct BatchCounts {
  uint64_t batch = 0;
  bool is_announced = false, is_fused = false;
  uint64_t lookups = 0, rows = 0;
  uint64_t lookup_bytes = 0;  // of the weights that were read, repeats counted
  uint64_t row_bytes = 0;     // weights and optimizer state of the distinct rows
  uint64_t log_bytes = 0;     // the undo frame
  uint64_t slot_bytes = 0;
  uint64_t recurring_rows = 0, recurring_lookups = 0;  // of rows that the batch before changed, too
  uint64_t first_rows = 0;  // that no batch changed since the profile began
  double log_share = 0, reduce_share = 0;
};

class Trace {
 public:
  struct Taken {
    std::vector<TraceSpan> spans;
    std::vector<BatchCounts> counts;
    uint64_t dropped = 0;
  };

  bool is_on() const { return is_on_.load(std::memory_order_relaxed); }
  void start(uint64_t spans_max);
  void stop();
  void add(const TraceSpan& span);
  void add(const BatchCounts& counts);
  Taken take();  // everything since the last call

  static void name_thread(Track track);
  static Track this_thread();
  static uint64_t now();

 private:
  std::atomic<bool> is_on_{false};
  std::mutex mutex_;
  uint64_t spans_max_ = 0;
  Taken taken_;
};

// A phase that lasts until the end of the scope.
class Traced {
 public:
  Traced(Trace& trace, Phase phase, uint64_t batch) : phase_(phase), batch_(batch) {
    if (trace.is_on()) trace_ = &trace, begin_ns_ = Trace::now();
  }
  ~Traced() { end(); }
  Traced(const Traced&) = delete;
  Traced& operator=(const Traced&) = delete;
  void end() {
    if (trace_ == nullptr) return;
    trace_->add(TraceSpan{phase_, Trace::this_thread(), batch_, begin_ns_, Trace::now()});
    trace_ = nullptr;
  }

 private:
  Trace* trace_ = nullptr;
  Phase phase_;
  uint64_t batch_, begin_ns_ = 0;
};

}  // namespace tcxl
