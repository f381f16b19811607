#include "recovery.h"

#include <algorithm>

#include "crc32c.h"
#include "errors.h"
#include "fault.h"
#include "rewind.h"

namespace tcxl {

using namespace layout;

namespace {

// Flagged frames to undo for recovery point x, newest first. A missing flag of a committed batch is
// damage: its frame may only go when the dense generation has reached it.
std::vector<Descriptor> frames_above(const Store& store, const UndoLog& undo, const Slot& slot,
                                     uint64_t x) {
  std::vector<Descriptor> frames;
  uint64_t last = slot.batch;
  while (last < slot.batch + kLookaheadMax && undo.find(last + 1, slot.life)) ++last;
  uint64_t life = slot.life;
  for (uint64_t n = last; n > x; --n) {
    // A rewind goes back beyond the slot's life; from the newest generation no other ever does.
    const bool is_older = slot.rolling_back == kRewinding && n <= slot.batch;
    const auto descriptor = is_older ? undo.find_on_line(n, life) : undo.find(n, life);
    if (!descriptor) {
      fail(ErrorKind::kCorrupted, "undo log of committed batch ", n, " is missing\n  where: pool '",
           store.path(), "', frame directory entry ", n % kDirectoryEntries,
           "\n  state: no row was changed; batch ", slot.batch,
           " stands, its dense part is of batch ", x,
           "\n  do:    open with resume 'latest' to go on at batch ", slot.batch,
           " with the dense part of batch ", x, "; ", repair_advice(store.path()));
    }
    life = descriptor->life;
    frames.push_back(*descriptor);
  }
  return frames;
}

// Flags of a life come after its first slot.
void refuse_lost_slot(const Store& store, const UndoLog& undo, const Slot& slot) {
  if (!undo.has_later_flag(slot.life)) return;
  fail(ErrorKind::kCorrupted, "the newest commit slot of pool '", store.path(),
       "' is damaged: its undo log has flags of a later life than ", slot.life, "\n  where: '",
       store.log().path(), "', bytes ", kSlotA, " and ", kSlotB,
       "\n  state: nothing was changed; rows may be of a batch that no slot tells\n  do:    ",
       copy_advice(store.path()));
}

// What the decision rests on may so far have survived only a kill, not a power failure.
void persist_evidence(Store& store, const Generation& generation,
                      const std::vector<Descriptor>& frames) {
  const Persistence& p = store.persistence();
  p.flush(store.log().base(), kHeadBytes);
  const GeometryHeader& g = store.geometry();
  p.flush(store.log().base() + g.dense_offset[generation.area],
          kDenseBlob + generation.header.blob_bytes);
  for (const Descriptor& d : frames) p.flush(store.log().base() + d.offset, d.bytes);
  p.fence();
}

void undo_frames(UndoLog& undo, const std::vector<Descriptor>& frames, RecoveryReport& report) {
  for (const Descriptor& d : frames) {
    const UndoLog::RolledBack rows = undo.roll_back(d);
    report.rows_changed += rows.changed;
    report.rows_rolled_back += rows.records;
    ++report.frames_undone;
  }
}

// The slot of the recovery point: the only store that makes it one.
void begin_life(Store& store, DenseLog& dense, const Slot& slot, const RecoveryReport& report) {
  Slot next{};
  next.batch = report.resumed_batch;
  // A recovery that was killed before its slot may have left a generation of the life it meant to
  // begin: with that life again it would count as soon as its batch has come.
  next.life = std::max(slot.life, dense.newest_life()) + 1;
  if (has_fault(Fault::kRecoverySameLife)) next.life = slot.life;
  if (report.dense_batch != report.resumed_batch)
    dense.rewrite(*dense.newest(), next.batch, next.life, report.resume);
  name_generation(next, *dense.newest());
  // Rows before the slot that vouches for them, where it is believed after a power failure.
  if (slot.journal_life != 0 && store.has_journal()) {
    if (!has_fault(Fault::kJournalRewindRowsLate)) store.sync_all();
    next.journal_life = slot.journal_life;
  }
  store.write_slot(next, report.resume);
}

}  // namespace

RecoveryReport recover(Store& store, UndoLog& undo, DenseLog& dense, bool exact) {
  RecoveryReport report;
  undo.attach();
  if (!store.slot()) return report;
  const Slot slot = *store.slot();
  // Rows of C are gone once an exact recovery has begun to take batches back: "latest" comes too
  // late then, and goes on with it.
  exact = exact || slot.rolling_back != 0;
  report.is_exact = exact;
  report.is_rewind = slot.rolling_back == kRewinding;
  const auto generation = dense.newest_valid(slot);
  if (!generation) {
    fail(ErrorKind::kCorrupted, "pool '", store.path(),
         "' has no valid dense generation for batch ", slot.batch,
         "\n  where: log region, dense areas\n  state: nothing was changed\n  do:    ",
         repair_advice(store.path()));
  }
  // The generation that a slot names gives way only to a newer one: no crash leaves an older one.
  if (slot.dense_batch != kNoBatch && generation->header.batch < slot.dense_batch) {
    fail(ErrorKind::kCorrupted, "the dense part of batch ", slot.dense_batch, " of pool '",
         store.path(), "' is damaged\n  where: log region, dense area ", slot.dense_area,
         "\n  state: nothing was changed; the older area has batch ", generation->header.batch,
         "\n  do:    ", repair_advice(store.path()));
  }
  refuse_lost_slot(store, undo, slot);
  report.has_point = true;
  report.committed_batch = slot.batch;
  report.dense_batch = generation->header.batch;
  report.resumed_batch = exact ? generation->header.batch : slot.batch;
  report.resume = exact ? dense.read_resume(*generation) : store.read_resume(slot);

  const auto frames = frames_above(store, undo, slot, report.resumed_batch);
  for (const Descriptor& d : frames) undo.check(d, d.batch <= slot.batch);
  const bool is_new_point = report.resumed_batch != slot.batch;
  const bool needs_dense = report.dense_batch != report.resumed_batch;
  const bool is_in_order = frames.empty() && !is_new_point && !needs_dense;
  if (!store.is_read_only() && (!store.was_clean() || report.is_rewind) &&
      !has_fault(Fault::kRecoveryWithoutEvidence) &&
      !(has_fault(Fault::kRewindWithoutEvidence) && report.is_rewind))
    persist_evidence(store, *generation, frames);
  // Before the first change: killed in what follows, a pool that was closed must not be taken for
  // one that still is, nor its bytes for durable.
  if (!store.is_read_only() && !is_in_order && !has_fault(Fault::kRecoveryStaysClean))
    store.mark_open();
  if (!store.is_read_only() && is_new_point && slot.rolling_back == 0 &&
      !has_fault(Fault::kRecoveryWithoutRollingBack)) {
    Slot begun = slot;
    begun.rolling_back = kExactResume;
    store.write_slot(begun, store.read_resume(slot));
  }
  // The slot that decided on a rewind may so far have survived only a kill; the journal would put
  // back no row that it does not know.
  if (report.is_rewind && slot.journal_life != 0 && store.has_journal() && !store.is_read_only() &&
      !has_fault(Fault::kJournalRewindSlotLate))
    store.sync_all();
  if (store.is_read_only() && !frames.empty()) store.data().make_private();
  if (!has_fault(Fault::kRecoverySlotFirst)) undo_frames(undo, frames, report);
  dense.set_newest(*generation);
  if (!store.is_read_only() && !is_in_order) begin_life(store, dense, slot, report);
  if (has_fault(Fault::kRecoverySlotFirst)) undo_frames(undo, frames, report);
  adopt_horizon(store, undo, dense, report.resumed_batch);
  return report;
}

std::vector<Damage> verify(Store& store) {
  std::vector<Damage> found;
  auto add = [&](const std::string& region, const std::string& where, const std::string& what) {
    found.push_back({region, where, what});
  };
  Span& log = store.log();
  for (const uint64_t offset : {kSuperblockA, kSuperblockB}) {
    const auto* s = log.at<Superblock>(offset);
    if (s->magic != kSuperblockMagic || s->crc != crc32c(0, s, sizeof *s - sizeof(uint32_t)))
      add("superblock", text("byte ", offset), "wrong checksum; the other copy is used");
  }
  const auto* session = log.at<Session>(kSession);
  if (session->magic != kSessionMagic || session->crc != store.checksum(*session))
    add("session", text("byte ", kSession), "wrong checksum");
  if (!store.slot()) return found;
  const Slot slot = *store.slot();
  const uint64_t other = (slot.seq & 1) != 0 ? kSlotA : kSlotB;
  const auto* older = log.at<Slot>(other);
  // A kill may leave the older slot torn, never with a number above the newest.
  if (slot.seq > 1 && store.was_clean() &&
      (older->magic != kSlotMagic || older->crc != store.checksum(*older)))
    add("slot", text("byte ", other), "older commit slot has a wrong checksum");
  const uint64_t geometry_seq = store.geometry().seq;
  const uint64_t other_geometry = (geometry_seq & 1) != 0 ? kGeometryB : kGeometryA;
  if (geometry_seq > 1 && store.was_clean() &&
      log.at<GeometryHeader>(other_geometry)->magic != kGeometryMagic)
    add("geometry", text("byte ", other_geometry), "older copy is damaged");
  DenseLog dense(store);
  for (uint32_t area = 0; area < kDenseAreas; ++area) {
    Generation g;
    const std::string reason = dense.check_area(area, g);
    if (!reason.empty() && reason != "no area" && reason != "empty")
      add("dense log", text("area ", area), reason);
  }
  const auto generation = dense.newest_valid(slot);
  if (!generation) {
    add("dense log", "both areas", text("no valid generation for batch ", slot.batch));
    return found;
  }
  UndoLog undo(store);
  undo.attach();
  if (undo.has_later_flag(slot.life))
    add("slot", "both slots",
        text("the newest is damaged: a flag is of a later life than ", slot.life));
  const bool is_rewinding = slot.rolling_back == kRewinding;
  for (uint64_t n = generation->header.batch + 1; n <= slot.batch + kLookaheadMax; ++n) {
    const auto descriptor =
        is_rewinding && n <= slot.batch ? undo.find_on_line(n, slot.life) : undo.find(n, slot.life);
    if (!descriptor && n <= slot.batch)
      add("undo log", text("batch ", n), "flag is missing or damaged");
    if (!descriptor) continue;
    try {
      undo.check(*descriptor, n <= slot.batch);
    } catch (const Error& error) {
      const std::string what = error.what();
      add("undo log", text("batch ", n), what.substr(0, what.find('\n')));
    }
  }
  return found;
}

}  // namespace tcxl
