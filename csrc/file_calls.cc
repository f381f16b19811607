#include "file_calls.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "errors.h"
#include "layout.h"

namespace tcxl {

namespace {

// tmpfs gives back all of a call that a signal interrupted: small parts get on in spite of a timer.
constexpr uint64_t kPart = 64 << 20;

}  // namespace

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

void write_again(std::byte* base, uint64_t bytes) {
  for (uint64_t at = 0; at < bytes; at += layout::kPage) {
    auto* byte = reinterpret_cast<volatile unsigned char*>(base + at);
    *byte = *byte;
  }
}

std::string sync_failed(int os_error, const std::string& path) {
  return text(
      "a sync of '", path, "' failed: ", std::strerror(os_error),
      "\n  state: the pool takes no batch any more; what was durable before still is\n  do:  "
      "  look at the medium and the kernel's log, then open the pool again; it recovers");
}

}  // namespace tcxl
