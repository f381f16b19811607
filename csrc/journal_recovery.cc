#include "journal_recovery.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <future>

#include "crash_point.h"
#include "errors.h"
#include "fault.h"

namespace tcxl {

using namespace layout;

namespace {

struct FrameAt {
  uint64_t offset, room, lsn, bytes;
};

struct Scan {
  std::vector<FrameAt> frames;
  uint64_t committed = 0;
  std::string resume;          // of the newest commit; empty: none since the base
  uint64_t end_lsn = 0;        // of the first frame that is not there
  uint64_t end = 0, rest = 0;  // its place in the ring, and bytes from there round to the first
  std::string fault;           // what no crash leaves; empty: nothing
};

// The frames from the base on, in order, up to the first that is not whole.
Scan scan_ring(const JournalFile& file) {
  const JournalSlot& slot = *file.slot();
  Scan scan;
  scan.committed = slot.base;
  scan.end_lsn = slot.first_lsn;
  uint64_t at = slot.head, travelled = 0;
  JournalFrame frame;
  while (travelled < slot.ring_bytes) {
    if (at >= slot.ring_bytes) at = 0;
    const uint64_t room = std::min(slot.ring_bytes - at, slot.ring_bytes - travelled);
    if (!file.read_frame(slot.ring_offset + at, room, scan.end_lsn, slot.life, frame)) break;
    const JournalHeader& h = frame.header;
    scan.frames.push_back({slot.ring_offset + at, room, scan.end_lsn++, h.bytes});
    if (h.kind == static_cast<uint64_t>(JournalKind::kBatch)) {
      if (h.batch != scan.committed && h.batch != scan.committed + 1) {
        scan.fault = text("batch ", h.batch, " follows batch ", scan.committed);
        break;
      }
      scan.committed = h.batch;
      scan.resume.assign(reinterpret_cast<const char*>(frame.bytes.data()) + h.resume_offset,
                         h.resume_bytes);
    }
    at += h.bytes;
    travelled += h.bytes;
  }
  scan.end = at;
  scan.rest = slot.ring_bytes - travelled;
  return scan;
}

// Puts rows to what they were after batch x.
class Replay {
 public:
  Replay(Store& store, uint64_t x) : store_(store), x_(x), seen_(store.tables().size()) {}

  void apply(const JournalFrame& frame) {
    const bool is_previous = frame.header.kind == static_cast<uint64_t>(JournalKind::kPrevious);
    const bool is_after =
        !is_previous && frame.header.batch > x_ && !has_fault(Fault::kJournalRedoBeyondPoint);
    const bool is_always = has_fault(Fault::kJournalPreviousAlways);
    for (size_t s = 0; s < frame.columns.size(); ++s) {
      const FrameSegment& segment = frame.plan.segments[s];
      const Table& table = store_.tables()[segment.table];
      std::vector<bool>& seen = seen_[segment.table];
      if (seen.empty()) seen.resize(table.view.rows);
      for (uint64_t r = 0; r < segment.count; ++r) {
        const uint64_t row = frame.columns[s].row[r];
        prefetch(table, segment, frame.columns[s].row[std::min(r + kAhead, segment.count - 1)]);
        // Previous bytes count when they are a row's first record: later ones belong to a base that
        // was about to be.
        if (!is_after && (!is_previous || !seen[row] || is_always))
          put(table, frame.columns[s], segment, r);
        seen[row] = true;
      }
    }
  }
  uint64_t rows = 0, changed = 0;

 private:
  static constexpr uint64_t kAhead = 16;  // rows
  static constexpr uint64_t kLine = 64;

  static void prefetch(const Table& table, const FrameSegment& segment, uint64_t row) {
    const float* weight = table.view.weight + row * segment.dim;
    for (uint64_t k = 0; k < segment.dim; k += kLine / sizeof(float)) {
      __builtin_prefetch(weight + k);
    }
    if (segment.state_floats > 0) {
      __builtin_prefetch(table.view.state + row * segment.state_floats);
    }
  }

  void put(const Table& table, const RecordColumns& c, const FrameSegment& segment, uint64_t r) {
    const uint64_t dim = segment.dim, states = segment.state_floats;
    float* weight = table.view.weight + c.row[r] * dim;
    const float* kept = c.weight + r * dim;
    bool differs = std::memcmp(weight, kept, dim * sizeof(float)) != 0;
    crash_point("recovery: row");
    std::memcpy(weight, kept, dim * sizeof(float));
    if (states > 0) {
      float* state = table.view.state + c.row[r] * states;
      differs |= std::memcmp(state, c.state + r * states, states * sizeof(float)) != 0;
      std::memcpy(state, c.state + r * states, states * sizeof(float));
    }
    ++rows;
    changed += differs ? 1 : 0;
  }

  Store& store_;
  const uint64_t x_;
  std::vector<std::vector<bool>> seen_;
};

[[noreturn]] void fail_damaged(const Store& store, const std::string& what) {
  fail(ErrorKind::kCorrupted, "the journal of pool '", store.path(), "' is damaged: ", what,
       "\n  state: nothing was changed; the machine restarted while the pool was open",
       "\n  do:    ", copy_advice(store.path()));
}

// Applies the frames in order; a second thread reads the next one meanwhile.
void replay_frames(const JournalFile& file, const Scan& scan, uint64_t life, const Store& store,
                   Replay& replay) {
  constexpr uint64_t kWorthThread = 1 << 16;  // bytes
  std::array<JournalFrame, 2> frames;
  const auto read = [&](size_t i) {
    const FrameAt& f = scan.frames[i];
    if (!file.read_frame(f.offset, f.room, f.lsn, life, frames[i % 2]))
      fail_damaged(store, text("frame ", f.lsn, " cannot be read twice"));
  };
  const auto start = [&](size_t i) {
    if (i == scan.frames.size()) return std::future<void>();
    const bool is_long = scan.frames[i].bytes >= kWorthThread;
    return std::async(is_long ? std::launch::async : std::launch::deferred, read, i);
  };
  std::future<void> next = start(0);
  for (size_t i = 0; i < scan.frames.size(); ++i) {
    next.get();
    next = start(i + 1);
    replay.apply(frames[i % 2]);
  }
}

// Batches out of order, or a frame that is missing although a later one says that it had been
// durable; empty: neither.
std::string scan_fault(const JournalFile& file, const Scan& scan) {
  if (!scan.fault.empty() || !file.has_later_frame(*file.slot(), scan.end_lsn, scan.end, scan.rest))
    return scan.fault;
  return text("frame ", scan.end_lsn, " was durable and is not whole");
}

// The newest dense generation that the journal's rows reach.
Generation find_generation(const Store& store, const DenseLog& dense, const JournalSlot& base,
                           uint64_t committed) {
  Slot seen_from{};
  seen_from.batch = committed;
  seen_from.life = base.pool_life;
  seen_from.dense_batch = base.dense_batch;
  seen_from.dense_life = base.dense_life;
  seen_from.dense_area = base.dense_area;
  seen_from.dense_crc = base.dense_crc;
  const auto generation = dense.newest_valid(seen_from, false);
  if (!generation || generation->header.batch < base.base) {
    fail_damaged(store,
                 text("no dense generation between batches ", base.base, " and ", committed));
  }
  return *generation;
}

}  // namespace

RecoveryReport recover_from_journal(Store& store, UndoLog& undo, DenseLog& dense,
                                    const JournalFile& file, bool exact) {
  const JournalSlot base = *file.slot();
  const Scan scan = scan_ring(file);
  if (const std::string fault = scan_fault(file, scan); !fault.empty()) fail_damaged(store, fault);
  const Generation generation = find_generation(store, dense, base, scan.committed);
  undo.attach();
  RecoveryReport report;
  report.is_exact = exact;
  report.has_point = true;
  report.committed_batch = scan.committed;
  report.dense_batch = generation.header.batch;
  report.resumed_batch = exact ? report.dense_batch : scan.committed;
  const bool has_record = !exact && !scan.resume.empty();
  report.resume = has_record ? scan.resume : dense.read_resume(generation);

  Replay replay(store, report.resumed_batch);
  replay_frames(file, scan, base.life, store, replay);
  report.rows_rolled_back = replay.rows;
  report.rows_changed = replay.changed;
  dense.set_newest(generation);
  if (store.is_read_only()) return report;

  store.sync_all();
  Slot next{};
  next.batch = report.resumed_batch;
  next.life = std::max({store.max_life(), dense.newest_life(), base.pool_life}) + 1;
  if (report.dense_batch != next.batch)
    dense.rewrite(generation, next.batch, next.life, report.resume);
  name_generation(next, *dense.newest());
  store.restart(next, report.resume);
  return report;
}

std::optional<uint64_t> newest_durable(const JournalFile& file) {
  if (!file.slot()) return std::nullopt;
  const JournalSlot& slot = *file.slot();
  std::vector<std::pair<uint64_t, uint64_t>> commits;  // lsn, batch
  uint64_t at = slot.head, travelled = 0, acked = 0;
  JournalHeader h;
  for (uint64_t lsn = slot.first_lsn; travelled < slot.ring_bytes; ++lsn) {
    if (at >= slot.ring_bytes) at = 0;
    const uint64_t room = std::min(slot.ring_bytes - at, slot.ring_bytes - travelled);
    if (!file.read_header(slot.ring_offset + at, room, lsn, slot.life, h)) break;
    if (h.kind == static_cast<uint64_t>(JournalKind::kBatch)) commits.emplace_back(lsn, h.batch);
    acked = std::max(acked, h.acked_lsn);
    at += h.bytes;
    travelled += h.bytes;
  }
  uint64_t durable = slot.base;
  for (const auto& [lsn, batch] : commits) durable = lsn <= acked ? batch : durable;
  return durable;
}

void verify_journal(const Store& store, std::vector<Damage>& found) {
  if (!store.has_journal()) return;
  try {
    const JournalFile file(store);
    if (file.slot()) {
      const std::string fault = scan_fault(file, scan_ring(file));
      if (!fault.empty()) found.push_back({"journal", file.path(), fault});
    } else if (store.slot() && store.slot()->seq > 1) {  // else its creation never completed
      found.push_back({"journal", file.path(), "no slot is valid"});
    }
  } catch (const Error& error) {
    found.push_back({"journal", store.path(), error.what()});
  }
}

}  // namespace tcxl
