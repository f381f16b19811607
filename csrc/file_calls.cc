#include "file_calls.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>

#include "layout.h"

namespace tcxl {

namespace {

// tmpfs gives back all of a call that a signal interrupted: small parts get on in spite of a timer.
constexpr uint64_t kPart = 64 << 20;

}  // namespace

int sync_data(int fd) {
  while (::fdatasync(fd) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

int sync_mapped(const void* p, uint64_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(p) / layout::kPage * layout::kPage;
  const uint64_t length = reinterpret_cast<uintptr_t>(p) + bytes - begin;
  // Of a shared mapping this writes and syncs the file's range, and that alone.
  while (::msync(reinterpret_cast<void*>(begin), length, MS_SYNC) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

int allocate(int fd, uint64_t from, uint64_t to) {
  while (from < to) {
    const uint64_t part = std::min(kPart, to - from);
    const int error = ::posix_fallocate(fd, static_cast<off_t>(from), static_cast<off_t>(part));
    if (error == EINTR) continue;
    if (error != 0) return error;
    from += part;
  }
  return 0;
}

int read_exactly(int fd, void* to, uint64_t bytes, uint64_t offset) {
  auto* at = static_cast<std::byte*>(to);
  while (bytes > 0) {
    const ssize_t n = ::pread(fd, at, bytes, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 ? errno : EIO;
    at += n;
    offset += static_cast<uint64_t>(n);
    bytes -= static_cast<uint64_t>(n);
  }
  return 0;
}

}  // namespace tcxl
