// The journal's file (level power on an ordinary file): slots and frames as bytes. Written with
// pwrite, made durable with fdatasync, never mapped: a sync of it must not wait for the tables.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "layout.h"
#include "store.h"
#include "undo_log.h"

namespace tcxl {

// Page-aligned memory that keeps its largest size.
class PageBuffer {
 public:
  void reserve(uint64_t bytes);
  std::byte* data() const { return bytes_.get(); }

 private:
  struct Free {
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte, Free> bytes_;
  uint64_t capacity_ = 0;
};

// A frame in memory. `columns`: one per segment of the plan.
struct JournalFrame {
  layout::JournalHeader header{};
  FramePlan plan;
  std::vector<RecordColumns> columns;
  PageBuffer bytes;

  // Gives the frame its id, and its columns their place in memory.
  void open(const Store& store, layout::JournalKind kind, uint64_t life, uint64_t id);
  // Puts header, segments and resume record in; nothing but lsn and acked_lsn is still to come.
  void close(const Store& store, uint64_t batch, const std::string& resume);
};

class JournalFile {
 public:
  // Opens the file, or creates it when the store may be written. kCorrupted when it is foreign.
  explicit JournalFile(const Store& store);

  const std::optional<layout::JournalSlot>& slot() const { return slot_; }
  void write_slot(layout::JournalSlot next);       // seq + 1; durable on return
  void put_slot(const layout::JournalSlot& slot);  // in its place, as it is; durable on return
  // Space for a ring at the end of the file, written once so that syncs change no metadata.
  uint64_t allocate_ring(uint64_t bytes);
  // The old ring's space goes back to the file system.
  void release(uint64_t offset, uint64_t bytes);
  void copy(uint64_t from, uint64_t to, uint64_t bytes);

  // Seals the frame (lsn, acked_lsn, checksum) and writes it at `offset` of the file.
  void write_frame(JournalFrame& frame, uint64_t offset);
  // Says that the `bytes` bytes at `offset` are skipped.
  void write_skip(uint64_t offset, uint64_t bytes, uint64_t lsn, uint64_t life, uint64_t acked_lsn);
  void sync();  // fdatasync; a failure is final

  // Reads the frame at `offset` of the file; false when none with this lsn and life is there whole.
  bool read_frame(uint64_t offset, uint64_t room, uint64_t lsn, uint64_t life,
                  JournalFrame& frame) const;
  // Header and segments of it alone.
  bool read_header(uint64_t offset, uint64_t room, uint64_t lsn, uint64_t life,
                   layout::JournalHeader& header) const;
  // Whether a frame behind the first bad one, number `lsn`, says that the bad one had been durable.
  // Looks at `bytes` of the ring from its byte `begin` on.
  bool has_later_frame(const layout::JournalSlot& slot, uint64_t lsn, uint64_t begin,
                       uint64_t bytes) const;
  uint64_t bytes() const;
  const std::string& path() const { return path_; }

 private:
  void read_slots();
  [[noreturn]] void fail_ring(int error, uint64_t old_bytes, uint64_t end);
  void write(const void* data, uint64_t bytes, uint64_t offset);
  bool read(void* data, uint64_t bytes, uint64_t offset) const;
  uint32_t header_crc(const layout::JournalHeader& header, const void* segments) const;

  const Store& store_;
  std::string path_;
  Fd fd_;
  // Whole pages go past the page cache where the file system can: that takes a fraction of the CPU
  // time, and a ring is not read again. Shares size and syncs with fd_.
  Fd direct_;
  std::optional<layout::JournalSlot> slot_;
};

}  // namespace tcxl
