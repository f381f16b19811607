#include "media.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "bus_error.h"
#include "crash_point.h"
#include "errors.h"
#include "file_calls.h"
#include "layout.h"
#include "recording.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#ifndef MAP_SYNC
#define MAP_SYNC 0x80000
#endif
#ifndef MAP_SHARED_VALIDATE
#define MAP_SHARED_VALIDATE 0x03
#endif

namespace tcxl {

const char* medium_name(MediumKind kind) {
  constexpr const char* kNames[] = {"devdax", "fsdax", "tmpfs", "block"};
  return kNames[static_cast<uint32_t>(kind)];
}

const char* durability_name(DurabilityLevel level) {
  switch (level) {
    case DurabilityLevel::kNone:
      return "none";
    case DurabilityLevel::kProcess:
      return "process";
    case DurabilityLevel::kPower:
      return "power";
  }
  return "?";
}

namespace {

const char* advice_for(int os_error) {
  switch (os_error) {
    case ENOENT:
    case ENOTDIR:
      return "check the path: the folder that it lies in must exist";
    case EACCES:
    case EPERM:
    case EROFS:
      return "choose a path where this user may write, or have the right granted";
    case ENOMEM:
      return "free memory, or raise the limit (ulimit -v, control group)";
    case EMFILE:
    case ENFILE:
      return "close files, or raise the limit (ulimit -n)";
    case ENOSPC:
    case EDQUOT:
      return "free space or raise the quota, or choose a larger medium";
    default:
      return "look at the medium and the kernel's log (dmesg), then run the same command again";
  }
}

}  // namespace

void fail_os(int os_error, const std::string& what) {
  throw Error(ErrorKind::kOs,
              text(what, ": ", std::strerror(os_error), "\n  do:    ", advice_for(os_error)),
              os_error);
}

void fail_allocation(int os_error, int fd, const std::string& path, uint64_t missing,
                     uint64_t all) {
  if (os_error != ENOSPC && os_error != EDQUOT && os_error != EFBIG)
    fail_os(os_error, text("cannot allocate ", all, " bytes for '", path, "'"));
  struct statvfs vfs;
  const uint64_t free_bytes =
      ::fstatvfs(fd, &vfs) == 0 ? static_cast<uint64_t>(vfs.f_bavail) * vfs.f_frsize : 0;
  fail(ErrorKind::kFull, "no room for the pool: '", path, "' needs ", missing, " bytes more (", all,
       " in all), ", free_bytes, " bytes are free",
       os_error == ENOSPC ? "" : text(" (", std::strerror(os_error), ")"),
       "\n  state: the file has its old size\n  do:    free space or raise the limit, or put the "
       "pool on a larger medium");
}

Fd& Fd::operator=(Fd&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = other.release();
  }
  return *this;
}

int Fd::release() {
  const int fd = fd_;
  fd_ = -1;
  return fd;
}

void Fd::reset() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

bool is_zero(const std::byte* p, uint64_t bytes) {
  // Each byte equals the one behind it, and the first is zero.
  return bytes == 0 || (p[0] == std::byte{0} && std::memcmp(p, p + 1, bytes - 1) == 0);
}

uint64_t file_bytes(int fd) {
  struct stat status;
  if (::fstat(fd, &status) != 0) fail_os(errno, "cannot look at the pool's file");
  return static_cast<uint64_t>(status.st_size);
}

namespace {

struct FileSystem {
  uint64_t magic;
  const char* name;
  bool is_network, is_copy_on_write;
};

constexpr FileSystem kFileSystems[] = {
    {0xef53, "ext4", false, false},
    {0x58465342, "xfs", false, false},
    {0x01021994, "tmpfs", false, false},
    {0x858458f6, "ramfs", false, false},
    {0x958458f6, "hugetlbfs", false, false},
    {0x9123683e, "btrfs", false, true},
    {0x2fc12fc1, "zfs", false, true},
    {0xca451a4e, "bcachefs", false, true},
    {0xf2f52010, "f2fs", false, true},
    {0x794c7630, "overlayfs", false, false},
    {0x6969, "nfs", true, false},
    {0xff534d42, "cifs", true, false},
    {0xfe534d42, "smb2", true, false},
    {0x65735546, "fuse", true, false},
    {0x01021997, "9p", true, false},
    {0x00c36400, "ceph", true, false},
    {0x0bd00bd0, "lustre", true, false},
    {0x47504653, "gpfs", true, false},
};

// MAP_SYNC is refused unless the kernel can promise that user-space flushes alone make stores
// durable. Readers ask, too: to write must not be part of the question.
bool has_map_sync(int fd) {
  void* p = ::mmap(nullptr, layout::kPage, PROT_READ, MAP_SHARED_VALIDATE | MAP_SYNC, fd, 0);
  if (p == MAP_FAILED) return false;
  ::munmap(p, layout::kPage);
  return true;
}

}  // namespace

Medium probe_medium(int fd, const std::string& force) {
  Medium info;
  struct stat status;
  if (::fstat(fd, &status) != 0) fail_os(errno, "cannot look at the pool's file");
  if (S_ISCHR(status.st_mode)) {
    info.kind = MediumKind::kDevDax;
    info.file_system = "devdax";
    return info;
  }
  struct statfs fs;
  if (::fstatfs(fd, &fs) != 0) fail_os(errno, "cannot look at the pool's file system");
  const auto magic = static_cast<uint64_t>(static_cast<unsigned long>(fs.f_type)) & 0xffffffffull;
  info.file_system = text("0x", std::hex, magic);
  for (const FileSystem& known : kFileSystems) {
    if (known.magic != magic) continue;
    info.file_system = known.name;
    info.is_network = known.is_network;
    info.is_copy_on_write = known.is_copy_on_write;
  }
  const bool in_memory =
      info.file_system == "tmpfs" || info.file_system == "ramfs" || info.file_system == "hugetlbfs";
  if (force == "block") {
    info.kind = MediumKind::kBlock;
  } else if (force == "fsdax" ||
             (!in_memory && status.st_size >= static_cast<off_t>(layout::kPage) &&
              has_map_sync(fd))) {
    info.kind = MediumKind::kFsDax;
  } else {
    info.kind = in_memory ? MediumKind::kTmpfs : MediumKind::kBlock;
  }
  return info;
}

// --- Span

Span::~Span() { unmap(); }

void Span::unmap() {
  if (base_ != nullptr) {
    recording::unmap(base_);
    forget_bus_errors(base_);
    ::munmap(base_, reserved_);
  }
  base_ = nullptr;
  bytes_ = reserved_ = 0;
}

void Span::map(int fd, uint64_t file_offset, uint64_t bytes, const Medium& medium, bool is_private,
               const std::string& path) {
  TCXL_ASSERT(base_ == nullptr);
  fd_ = fd;
  file_offset_ = file_offset;
  is_private_ = is_private;
  medium_ = medium;
  path_ = path;
  // Address space only: costs nothing until a file is mapped into it. Halve where the user limits
  // it.
  for (reserved_ =
           std::max<uint64_t>(1ull << 40, layout::round_up(bytes * 4, layout::kRegionAlign));
       reserved_ > bytes; reserved_ /= 2) {
    void* p = ::mmap(nullptr, reserved_ + layout::kRegionAlign, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) continue;
    const auto start = reinterpret_cast<uintptr_t>(p);
    const uintptr_t aligned = layout::round_up(start, layout::kRegionAlign);
    if (aligned > start) ::munmap(p, aligned - start);
    const uintptr_t end = start + reserved_ + layout::kRegionAlign;
    if (end > aligned + reserved_)
      ::munmap(reinterpret_cast<void*>(aligned + reserved_), end - aligned - reserved_);
    base_ = reinterpret_cast<std::byte*>(aligned);
    break;
  }
  if (base_ == nullptr)
    fail_os(ENOMEM, text("cannot reserve address space for '", path, "' (see ulimit -v)"));
  if (bytes > 0) map_tail(0, bytes);
}

void Span::forget() {
  forget_bus_errors(base_);
  base_ = nullptr;
  bytes_ = reserved_ = 0;
}

void Span::map_tail(uint64_t from, uint64_t to) {
  from = from / layout::kPage * layout::kPage;
  int flags = MAP_FIXED | (is_private_ ? MAP_PRIVATE | MAP_NORESERVE : MAP_SHARED);
  const bool dax = (medium_.kind == MediumKind::kDevDax || medium_.kind == MediumKind::kFsDax) &&
                   medium_.file_system != "tmpfs";
  if (dax && !is_private_) flags = MAP_FIXED | MAP_SHARED_VALIDATE | MAP_SYNC;
  if (is_device_view()) flags = MAP_FIXED | MAP_SHARED;
  void* p = ::mmap(base_ + from, to - from, is_device_view() ? PROT_READ : PROT_READ | PROT_WRITE,
                   flags, fd_, static_cast<off_t>(file_offset_ + from));
  if (p == MAP_FAILED) fail_os(errno, text("cannot map '", path_, "' up to byte ", to));
  // A forked child (data-loader worker) must neither write to the pool nor keep it alive.
  ::madvise(base_ + from, to - from, MADV_DONTFORK);
  bytes_ = to;
  explain_bus_errors(base_, bytes_, file_offset_, path_);
  if (!is_private_) recording::map(path_, fd_, base_, bytes_);
}

void Span::make_private() {
  if (!is_device_view() || bytes_ == 0) return;
  void* copy = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (copy == MAP_FAILED) fail_os(errno, text("no memory for a copy of '", path_, "'"));
  std::memcpy(copy, base_, bytes_);
  if (::mremap(copy, bytes_, bytes_, MREMAP_MAYMOVE | MREMAP_FIXED, base_) == MAP_FAILED)
    fail_os(errno, text("cannot map a copy of '", path_, "'"));
}

void Span::grow(uint64_t bytes, bool sparse) {
  if (bytes <= bytes_) return;
  if (bytes > reserved_) {
    fail(ErrorKind::kFull, "'", path_, "' cannot grow to ", bytes,
         " bytes in this process\n  do:    close the pool and open it again");
  }
  if (medium_.kind != MediumKind::kDevDax) {
    struct stat status;
    if (::fstat(fd_, &status) != 0) fail_os(errno, text("cannot look at '", path_, "'"));
    const auto old_bytes = static_cast<uint64_t>(status.st_size);
    if (bytes > old_bytes) {
      const int error = sparse ? (::ftruncate(fd_, static_cast<off_t>(bytes)) == 0 ? 0 : errno)
                               : allocate(fd_, old_bytes, bytes);
      if (error != 0) {
        if (::ftruncate(fd_, static_cast<off_t>(old_bytes)) != 0)
          fail_os(errno, text("cannot shrink '", path_, "' back"));
        fail_allocation(error, fd_, path_, bytes - old_bytes, bytes);
      }
    }
  }
  map_tail(bytes_, bytes);
}

uint64_t Span::page_bytes() const {
  // smaps lists the mapping by its first address; FilePmdMapped/ShmemPmdMapped/KernelPageSize tell
  // huge pages.
  std::ifstream smaps("/proc/self/smaps");
  std::string line;
  char start[32];
  std::snprintf(start, sizeof start, "%lx-",
                static_cast<unsigned long>(reinterpret_cast<uintptr_t>(base_)));
  bool inside = false;
  while (std::getline(smaps, line)) {
    if (line.find('-') != std::string::npos && line.find(':') > line.find('-'))
      inside = line.rfind(start, 0) == 0;
    if (!inside) continue;
    unsigned long kb = 0;
    for (const char* key : {"FilePmdMapped:", "ShmemPmdMapped:"}) {
      if (line.rfind(key, 0) == 0 &&
          std::sscanf(line.c_str() + std::strlen(key), "%lu", &kb) == 1 && kb > 0)
        return 2ull << 20;
    }
    if (line.rfind("KernelPageSize:", 0) == 0 && std::sscanf(line.c_str() + 15, "%lu", &kb) == 1 &&
        kb > 4)
      return kb << 10;
  }
  return layout::kPage;
}

// --- Persistence

#if defined(__x86_64__)
namespace {

template <void (*Instruction)(const std::byte*)>
void flush_lines(const void* p, size_t bytes) {
  const auto* line = reinterpret_cast<const std::byte*>(reinterpret_cast<uintptr_t>(p) /
                                                        layout::kLine * layout::kLine);
  const auto* end = static_cast<const std::byte*>(p) + bytes;
  for (; line < end; line += layout::kLine) Instruction(line);
}

[[gnu::target("clwb")]] void clwb_line(const std::byte* p) { _mm_clwb(const_cast<std::byte*>(p)); }
[[gnu::target("clflushopt")]] void clflushopt_line(const std::byte* p) {
  _mm_clflushopt(const_cast<std::byte*>(p));
}
void clflush_line(const std::byte* p) { _mm_clflush(p); }

}  // namespace
#endif

Persistence::Persistence(DurabilityLevel level, MediumKind kind) {
  if (level != DurabilityLevel::kPower) return;
  if (kind == MediumKind::kBlock) return;  // the journal's work
  if (kind != MediumKind::kDevDax && kind != MediumKind::kFsDax) {
    fail(ErrorKind::kDurability,
         "durability 'power' needs DAX persistent memory here, the medium is ", medium_name(kind),
         "\n  do:    use durability 'process', or put the pool on a disk or on persistent memory");
  }
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  __get_cpuid_count(7, 0, &a, &b, &c, &d);
  std::string choice = (b & (1u << 24)) != 0   ? "clwb"
                       : (b & (1u << 23)) != 0 ? "clflushopt"
                                               : "clflush";
  if (const char* wanted = std::getenv("TRAININGCXL_FLUSH"))
    choice = wanted;  // tests cover each branch
  if (choice == "clwb") {
    flush_ = flush_lines<clwb_line>, instruction_ = "clwb";
  } else if (choice == "clflushopt") {
    flush_ = flush_lines<clflushopt_line>, instruction_ = "clflushopt";
  } else {
    flush_ = flush_lines<clflush_line>, instruction_ = "clflush";
  }
#else
  fail(ErrorKind::kDurability,
       "durability 'power' on persistent memory is available on x86-64 only\n  do:    use "
       "durability "
       "'process'");
#endif
  if (recording::is_on()) flush_ = recording::flush, instruction_ = "recorded";
}

void Persistence::fence() {
  crash_point("fence");
#if defined(__x86_64__)
  _mm_sfence();  // also orders the non-temporal stores of the log, at every level
#endif
  std::atomic_thread_fence(std::memory_order_release);
  crash_point("fenced");
}

}  // namespace tcxl
