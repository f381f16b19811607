// Everything of one open pool, in the order of its layers: what the Python class `_core.Pool`
// holds.
#pragma once

#include <unistd.h>

#include <memory>
#include <optional>
#include <string>

#include "engine.h"
#include "errors.h"
#include "fault.h"
#include "journal_recovery.h"
#include "recovery.h"
#include "repair.h"
#include "rewind.h"

namespace tcxl {

inline DurabilityLevel parse_durability(const std::string& name) {
  if (name == "auto") return DurabilityLevel::kNone;
  for (const auto level : {DurabilityLevel::kProcess, DurabilityLevel::kPower}) {
    if (name == durability_name(level)) return level;
  }
  fail(ErrorKind::kValue, "durability is '", name, "', expected 'auto', 'process' or 'power'");
}

class CorePool {
 public:
  CorePool(const std::string& path, const std::string& device, const std::string& durability,
           bool read_only, bool unlocked, bool trust_after_reboot, const std::string& force_medium,
           bool assume_reboot, bool sparse)
      : store_(OpenOptions{path, device, parse_durability(durability), read_only, unlocked,
                           trust_after_reboot, force_medium, assume_reboot, sparse}),
        undo_(store_),
        dense_(store_) {}

  ~CorePool() { is_forked(); }
  CorePool(const CorePool&) = delete;
  CorePool& operator=(const CorePool&) = delete;

  Store& store() { return store_; }
  DenseLog& dense() {
    check_owner();
    return dense_;
  }
  std::optional<Generation> evidence() const {
    return store_.slot() ? dense_.newest_valid(*store_.slot()) : std::nullopt;
  }
  Engine& engine() {
    check_owner();
    if (!engine_) {
      fail(ErrorKind::kPool, "pool '", store_.path(),
           "' is closed or was not started\n  do:    open it again");
    }
    return *engine_;
  }
  void begin_snapshot(const std::string& path) {
    const bool reads = store_.is_read_only();  // then the slot's record is not the recovered one
    if (!store_.slot()) {
      fail(ErrorKind::kPool, "pool '", store_.path(),
           "' has no batch yet\n  do:    train first; FaultTolerantRun commits batch 0");
    }
    engine().begin_snapshot(path, reads ? report_.resume : store_.read_resume(*store_.slot()));
  }
  Journal* journal() { return journal_.get(); }
  // Everything committed is on the medium as durably as it can be.
  void sync() {
    check_owner();
    store_.check_alive();
    try {
      if (journal_ && store_.slot()) {
        journal_->wait_durable();
      } else {
        store_.sync_all();
      }
    } catch (const Error&) {
      store_.note_told();
      throw;
    }
  }
  // The batches that the pool can be taken back to; the present one is not among them.
  std::vector<RewindPoint> rewind_points() {
    if (store_.is_read_only())
      return tcxl::rewind_points(store_, undo_, dense_, report_.resumed_batch);
    return engine().rewind_points();
  }
  RecoveryReport rewind(uint64_t batch) { return report_ = engine().rewind(batch); }
  // For a pool that recover() refuses, in its place.
  std::vector<RepairPoint> repair_points() {
    undo_.attach();
    return tcxl::repair_points(store_, undo_, dense_);
  }
  // For a pool that opens all the same.
  void clear_damaged() { tcxl::clear_damaged(store_, dense_); }
  RecoveryReport repair(uint64_t batch) {
    if (store_.needs_journal())
      fail(ErrorKind::kPool, "the machine restarted while pool '", store_.path(),
           "' was open: only its journal tells where it stands\n  do:    ",
           copy_advice(store_.path()));
    for (const RepairPoint& point : repair_points()) {
      if (point.batch != batch) continue;
      uint64_t journal_life = 0;
      if (store_.has_journal()) {
        const JournalFile file(store_);
        if (file.slot()) journal_life = file.slot()->life;
      }
      report_ = tcxl::repair(store_, undo_, dense_, point, journal_life);
      if (store_.has_journal()) Journal(store_).rebase(*store_.slot());
      return report_;
    }
    fail(ErrorKind::kRecovery, "batch ", batch, " of pool '", store_.path(),
         "' cannot be reached\n  state: nothing was changed\n  do:    ",
         repair_advice(store_.path()));
  }
  RecoveryReport recover(bool exact) {
    if (store_.had_failed_sync() && !store_.is_read_only()) store_.write_all_again();
    if (store_.needs_journal()) {
      const JournalFile file(store_);
      if (file.slot() && is_told_by_slot(*file.slot())) {
        // A rewind made log and tables durable before it began: the journal is that of before.
      } else if (file.slot()) {
        report_ = recover_from_journal(store_, undo_, dense_, file, exact);
      } else {
        store_.forget_creation();
      }
    }
    if (!report_.has_point) report_ = tcxl::recover(store_, undo_, dense_, exact);
    if (store_.is_read_only()) return report_;
    if (store_.has_journal()) {
      journal_ = std::make_unique<Journal>(store_);
      if (store_.slot()) journal_->rebase(*store_.slot());
    }
    store_.mark_open();
    return report_;
  }
  void drop_announced() {
    if (engine_ && ::getpid() == owner_)
      engine_->drop_announced();  // a loop over batches may end after the pool was closed
  }
  void start(const EngineOptions& options) {
    if (journal_) journal_->configure(options.lag_max, options.journal_bytes, options.lookahead);
    engine_ = std::make_unique<Engine>(store_, undo_, dense_, journal_.get(), report_.resumed_batch,
                                       options);
  }
  void check_owner() const {
    if (::getpid() == owner_) return;
    fail(ErrorKind::kPool, "pool '", store_.path(), "' was opened by process ", owner_,
         " before the fork; its child cannot use it\n  do:    fork before opening the pool, or do "
         "in the child only what needs no rows");
  }
  // A forked child has neither the engine's threads nor the pool's memory: it must not wait for
  // the ones, nor unmap what now lies where the other was.
  bool is_forked() {
    if (::getpid() == owner_) return false;
    static_cast<void>(engine_.release());
    static_cast<void>(journal_.release());
    store_.disown();
    return true;
  }
  void close(bool is_clean) {
    if (is_forked()) return;
    engine_.reset();
    journal_.reset();
    try {
      // An error that was raised is not raised again; the next opening recovers.
      if (is_clean && !store_.is_read_only() && !store_.is_poison_told()) store_.mark_clean();
    } catch (const Error&) {
      store_.unlock();  // whatever still holds this object: the way out is to open the pool again
      throw;
    }
    store_.unlock();
  }

 private:
  bool is_told_by_slot(const layout::JournalSlot& journal) const {
    return !has_fault(Fault::kJournalRewindIgnored) && store_.slot() &&
           store_.slot()->journal_life != 0 && store_.slot()->journal_life == journal.life;
  }

  Store store_;
  UndoLog undo_;
  DenseLog dense_;
  RecoveryReport report_;
  std::unique_ptr<Journal> journal_;
  std::unique_ptr<Engine> engine_;
  const pid_t owner_ = ::getpid();
};

inline const Table& table_at(CorePool& pool, size_t index) {
  pool.check_owner();
  const auto& tables = pool.store().tables();
  if (index >= tables.size()) fail(ErrorKind::kIndex, "there is no table number ", index);
  return tables[index];
}

}  // namespace tcxl
