// The pool's files and the structures in their head: superblock, session, slots, resume records,
// geometry, lock. Knows the format, not the protocol: who writes what when is engine.cc and
// recovery.cc.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "file_calls.h"
#include "kernels.h"
#include "layout.h"
#include "media.h"
#include "trace.h"

namespace tcxl {

struct OpenOptions {
  std::string path;    // pool folder; also the sidecar folder of a DAX device
  std::string device;  // "/dev/daxX.Y" or empty
  // kNone: the one it was created with, `process` for a new pool.
  DurabilityLevel durability = DurabilityLevel::kProcess;
  bool read_only = false;
  bool unlocked = false;  // with read_only: the head only, while a trainer may run (inspect)
  bool trust_after_reboot = false;
  std::string force_medium;    // tests: "fsdax" or "block" on tmpfs
  bool assume_reboot = false;  // tests: as if the machine had restarted since
  bool sparse = false;         // tests: files with holes
  bool is_snapshot = false;    // a snapshot in the making: the file that says so is there
};

struct Table {
  std::string name;
  layout::TableRecord record;
  TableView view;
};

// In the folder of a snapshot until it is a whole pool.
inline constexpr const char* kIncompleteSnapshot = "/snapshot.incomplete";

class Store {
 public:
  // Opens or creates, locks (unless read only), checks every checksum of the head. No recovery.
  explicit Store(const OpenOptions& options);
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // --- geometry: written as a whole, newest valid copy wins
  const layout::GeometryHeader& geometry() const { return geometry_; }
  const std::vector<Table>& tables() const { return tables_; }
  // Reserves 2 MiB aligned space at the end of a span; nothing is recorded until write_geometry().
  uint64_t allocate_log(uint64_t bytes);
  uint64_t allocate_data(uint64_t bytes);
  // Space for the columns of a new table; not recorded before commit_tables().
  size_t add_table(const layout::TableRecord& record);
  void write_geometry(layout::GeometryHeader next);
  void commit_tables();  // geometry seq + 1 with all tables added so far

  // --- slots and resume records
  const std::optional<layout::Slot>& slot() const { return slot_; }
  // The commit: resume record (P), then slot seq + 1 (P).
  void write_slot(layout::Slot next, const std::string& resume);
  std::string read_resume(const layout::Slot& slot) const;
  // The slot of a recovery that believed nothing else of the log: no frame of it counts any more.
  void restart(const layout::Slot& slot, const std::string& resume);
  // There is no journal to recover from: right if the pool's creation was never completed, else
  // kCorrupted.
  void forget_creation();

  // --- the rest
  void mark_open();   // session: not clean, this boot
  void mark_clean();  // syncs both files first
  void disown();      // in a forked child: forgets lock and mappings, which are not its own
  void unlock();      // closed: others may open it, though views keep this object alive
  void sync_all();
  // Level power on an ordinary file: the bytes are durable on return. Else nothing.
  void make_durable(void* p, uint64_t bytes);
  // A sync failed: the next opening must take nothing for durable because the kernel says so.
  void distrust() const;
  [[noreturn]] void fail_sync(int error, const char* name);  // distrusts and poisons
  void poison(const std::string& why);  // no store any more; reopen and recover
  bool is_poisoned() const;
  void note_told() const;  // the trainer has seen an error of it
  bool is_poison_told() const;
  void check_alive() const;

  Span& log() { return log_; }
  Span& data() { return data_; }
  const Span& log() const { return log_; }
  const Span& data() const { return data_; }
  const Persistence& persistence() const { return persistence_; }
  const Medium& medium() const { return medium_; }
  DurabilityLevel durability() const { return durability_; }
  uint32_t crc_seed() const { return crc_seed_; }
  std::string uuid_text() const;
  const std::string& path() const { return options_.path; }
  bool is_read_only() const { return options_.read_only; }
  bool was_created() const { return was_created_; }
  bool was_clean() const { return was_clean_; }
  // Level power on an ordinary file: a journal beside log and data (journal.h).
  bool has_journal() const {
    return durability_ == DurabilityLevel::kPower && medium_.kind == MediumKind::kBlock;
  }
  // The machine went down while the pool was open, or a sync failed: only the journal knows what
  // is durable.
  bool needs_journal() const {
    return has_journal() && !was_created_ && !was_clean_ && (!is_same_boot_ || had_failed_sync_);
  }
  bool had_failed_sync() const { return had_failed_sync_; }
  // Has all of both files written again. What the kernel kept of them in memory is newer than what
  // is on the medium, though it may call it clean.
  void write_all_again() const {
    write_again(log_.base(), log_.bytes());
    write_again(data_.base(), data_.bytes());
  }
  const std::string& creation_note() const { return creation_note_; }
  Trace& trace() { return trace_; }
  uint64_t max_life() const { return slot_ ? slot_->life : 0; }
  template <typename T>
  uint32_t checksum(const T& structure) const {  // over everything before the trailing crc
    return crc_of(&structure, sizeof(T) - sizeof(uint32_t));
  }
  uint32_t crc_of(const void* p, uint64_t bytes) const;

 private:
  void take_lock();
  void open_files();
  void refuse_orphaned_data() const;
  void load_durability();
  void refuse_weaker_medium() const;
  void create(bool is_leftover);
  void load_superblock();
  void load_geometry();
  void read_slots();
  void load_slots();
  [[noreturn]] void fail_byte_order() const;
  void read_session();
  void check_session();
  void bind_views();
  bool read_geometry_copy(uint64_t offset, layout::GeometryHeader& header,
                          std::span<const layout::TableRecord>& records) const;

  OpenOptions options_;
  DurabilityLevel durability_ = DurabilityLevel::kProcess;
  Medium medium_;
  Persistence persistence_;
  Fd lock_fd_, log_fd_, data_fd_;
  Span log_, data_;
  layout::Superblock superblock_{};
  layout::GeometryHeader geometry_{};
  std::vector<Table> tables_;
  std::optional<layout::Slot> slot_;
  std::string found_resume_;  // of the slot that was found on opening
  uint32_t crc_seed_ = 0;
  bool was_created_ = false;
  bool was_clean_ = true;
  bool is_same_boot_ = true;
  bool had_failed_sync_ = false;
  uint64_t device_bytes_ = 0;        // DAX device: log window first, data window behind it
  mutable std::mutex poison_mutex_;  // threads that write poison, all check
  std::string poisoned_;
  mutable bool is_told_ = false;
  std::string creation_note_;
  Trace trace_;  // of engine and journal
  int lock_slot_ = -1;
};

// Removes the files of a pool (never the user's other files in the folder). kLocked if it is open
// somewhere.
void discard_pool(const std::string& path);

}  // namespace tcxl
