// What the pool lies on: probing, mapping with room to grow, flush primitives (docs/format.md,
// "Media").
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels.h"

namespace tcxl {

enum class DurabilityLevel : uint32_t { kNone = 0, kProcess = 1, kPower = 2 };
enum class MediumKind : uint32_t { kDevDax, kFsDax, kTmpfs, kBlock };

const char* medium_name(MediumKind kind);
const char* durability_name(DurabilityLevel level);

// A file descriptor that closes itself; moves, never copies.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept;
  ~Fd() { reset(); }
  int get() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  int release();
  void reset();

 private:
  int fd_ = -1;
};

struct Medium {
  MediumKind kind = MediumKind::kBlock;
  std::string file_system;  // "ext4", "tmpfs", ...
  bool is_network =
      false;  // page cache of one machine only: kill -9 is survived, the machine's loss is not
  bool is_copy_on_write = false;
};

// Looks at the file system (or DAX device) that holds `fd`. force: tests of the code for "fsdax" or
// "block" on tmpfs.
Medium probe_medium(int fd, const std::string& force);

// One file (or a window of a DAX device), mapped shared at a fixed address, with address space kept
// free behind it so that growing never moves a byte. Private mappings read a pool without changing
// it.
class Span {
 public:
  Span() = default;
  ~Span();
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

  // Maps the first `bytes` bytes of the window of `fd` that starts at `file_offset`.
  void map(int fd, uint64_t file_offset, uint64_t bytes, const Medium& medium, bool is_private,
           const std::string& path);
  // Allocates (posix_fallocate, never sparse unless `sparse`) and maps up to `bytes`.
  // kFull with path, needed and free bytes when the medium has no room; the file keeps its old
  // size.
  void grow(uint64_t bytes, bool sparse);
  void unmap();
  void forget();  // leaves the address space as it is: in a forked child it is no longer ours

  std::byte* base() const { return base_; }
  uint64_t bytes() const { return bytes_; }
  int fd() const { return fd_; }
  const std::string& path() const { return path_; }
  uint64_t page_bytes() const;  // what the kernel maps it with, from smaps: 4096 or 2 MiB
  template <typename T>
  T* at(uint64_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }

 private:
  void map_tail(uint64_t from, uint64_t to);
  int fd_ = -1;
  uint64_t file_offset_ = 0;
  std::byte* base_ = nullptr;
  uint64_t bytes_ = 0;
  uint64_t reserved_ = 0;
  bool is_private_ = false;
  Medium medium_;
  std::string path_;
};

// Flush and fence of one pool. At level process both are orderings of stores only: kill -9 loses no
// store that was made, and x86 and the release fence keep their order. At level power on DAX: clwb
// (or the best the CPU has) and sfence.
class Persistence {
 public:
  Persistence() = default;
  Persistence(DurabilityLevel level, MediumKind kind);

  FlushFunction flush_function() const { return flush_; }  // nullptr: nothing to flush
  void flush(const void* p, uint64_t bytes) const {
    if (flush_ != nullptr) flush_(p, bytes);
  }
  static void fence();
  // P of the protocol: everything in [p, p + bytes) is durable on return.
  void persist(const void* p, uint64_t bytes) const {
    flush(p, bytes);
    fence();
  }
  const char* instruction() const { return instruction_; }

 private:
  FlushFunction flush_ = nullptr;
  const char* instruction_ = "none";
};

bool is_zero(const std::byte* p, uint64_t bytes);
uint64_t file_bytes(int fd);
// fsync of a folder: makes created and renamed entries durable.
void sync_folder(const std::string& folder);
// fsync; its result. An interrupted sync goes on; an error is final and never tried again: the
// kernel may have dropped what it could not write, and would report success for what is left.
int sync_file(int fd);
// fdatasync, and msync of mapped bytes from the page of `p` on; they return what the call does.
int sync_file_data(int fd);
int sync_mapped(void* p, uint64_t bytes);
[[noreturn]] void fail_os(int os_error, const std::string& what);
// A file could not be given `missing` more bytes, `all` in total. kFull with path, needed and free
// bytes where that is the reason.
[[noreturn]] void fail_allocation(int os_error, int fd, const std::string& path, uint64_t missing,
                                  uint64_t all);

}  // namespace tcxl
