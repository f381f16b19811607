// Everything of one open pool, in the order of its layers: what the Python class `_core.Pool`
// holds.
#pragma once

#include <unistd.h>

#include <memory>
#include <optional>
#include <string>

#include "engine.h"
#include "errors.h"
#include "recovery.h"

namespace tcxl {

inline DurabilityLevel parse_durability(const std::string& name) {
  for (const auto level : {DurabilityLevel::kProcess, DurabilityLevel::kPower}) {
    if (name == durability_name(level)) return level;
  }
  fail(ErrorKind::kValue, "durability is '", name, "', expected 'process' or 'power'");
}

class CorePool {
 public:
  CorePool(const std::string& path, const std::string& device, const std::string& durability,
           bool read_only, bool unlocked, bool trust_after_reboot, bool force_fsdax, bool sparse)
      : store_(OpenOptions{path, device, parse_durability(durability), read_only, unlocked,
                           trust_after_reboot, force_fsdax, sparse}),
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
    if (!engine_) fail(ErrorKind::kPool, "pool '", store_.path(), "' is closed or was not started");
    return *engine_;
  }
  RecoveryReport recover(bool exact) {
    report_ = tcxl::recover(store_, undo_, dense_, exact);
    if (!store_.is_read_only()) store_.mark_open();
    return report_;
  }
  void drop_announced() {
    if (engine_ && ::getpid() == owner_)
      engine_->drop_announced();  // a loop over batches may end after the pool was closed
  }
  void start(const EngineOptions& options) {
    engine_ = std::make_unique<Engine>(store_, undo_, dense_, report_.resumed_batch, options);
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
    store_.disown();
    return true;
  }
  void close(bool is_clean) {
    if (is_forked()) return;
    engine_.reset();
    if (is_clean && !store_.is_read_only()) store_.mark_clean();
    store_.unlock();
  }

 private:
  Store store_;
  UndoLog undo_;
  DenseLog dense_;
  RecoveryReport report_;
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
