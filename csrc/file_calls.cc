#include "file_calls.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "errors.h"
#include "layout.h"
#include "media.h"
#include "recording.h"

namespace tcxl {

namespace {

// tmpfs gives back all of a call that a signal interrupted: small parts get on in spite of a timer.
constexpr uint64_t kPart = 64 << 20;

}  // namespace

void sync_folder(const std::string& folder) {
  Fd fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.is_open() || ::fsync(fd.get()) != 0)
    fail_os(errno, text("cannot sync folder '", folder, "'"));
  recording::folder(folder);
}

int sync_file(int fd) {
  recording::sync_begin(fd);
  int result = ::fsync(fd);
  while (result != 0 && errno == EINTR) result = ::fsync(fd);
  if (result == 0) recording::sync_end(fd);
  return result;
}

int sync_file_data(int fd) {
  recording::sync_begin(fd);
  int result = ::fdatasync(fd);
  while (result != 0 && errno == EINTR) result = ::fdatasync(fd);
  if (result == 0) recording::sync_end(fd);
  return result;
}

int sync_mapped(void* p, uint64_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(p) / layout::kPage * layout::kPage;
  const uint64_t length = reinterpret_cast<uintptr_t>(p) + bytes - begin;
  auto* page = reinterpret_cast<void*>(begin);
  recording::sync_begin(page, layout::round_up(length, layout::kPage));
  int result = ::msync(page, length, MS_SYNC);
  while (result != 0 && errno == EINTR) result = ::msync(page, length, MS_SYNC);
  if (result == 0) recording::sync_end(page);
  return result;
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
