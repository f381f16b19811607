#include "lock.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <string>

#include "errors.h"

namespace tcxl {

namespace {

// Fixed size and lock free: a fork handler may run while any other thread holds any lock.
std::array<std::atomic<int>, 256> g_child_closes;

void close_all_in_child() {
  for (auto& entry : g_child_closes) {
    const int stored = entry.exchange(0);
    if (stored > 0) ::close(stored - 1);
  }
}

std::string read_owner(int fd) {
  char buffer[64] = {};
  const ssize_t n = ::pread(fd, buffer, sizeof buffer - 1, 0);
  return n > 0 ? std::string(buffer, static_cast<size_t>(n)) : std::string("unknown");
}

}  // namespace

void close_in_children(int fd) {
  static const bool installed = ::pthread_atfork(nullptr, nullptr, close_all_in_child) == 0;
  TCXL_ASSERT(installed);
  for (auto& entry : g_child_closes) {
    int empty = 0;
    if (entry.compare_exchange_strong(empty, fd + 1)) return;
  }
  fail(ErrorKind::kPool, "more than ", g_child_closes.size(),
       " pools are open in this process\n  do:    close some");
}

void forget_in_children(int fd) {
  for (auto& entry : g_child_closes) {
    int expected = fd + 1;
    if (entry.compare_exchange_strong(expected, 0)) return;
  }
}

Fd lock_pool(const std::string& folder, bool exclusive) {
  const std::string path = folder + "/lock";
  Fd fd(
      ::open(path.c_str(), exclusive ? O_RDWR | O_CREAT | O_CLOEXEC : O_RDONLY | O_CLOEXEC, 0666));
  if (!fd.is_open() && errno == ENOENT && !exclusive) {
    fail(ErrorKind::kPool, "'", folder,
         "' holds no pool, or a copy of one without its file 'lock'\n"
         "  do:    check the path; beside copied files 'log' and 'data' make an empty file 'lock'");
  }
  if (!fd.is_open() && errno == ENOTDIR) {
    fail(ErrorKind::kPool, "'", folder,
         "' is a file, a pool is a folder\n  do:    choose another path");
  }
  if (!fd.is_open()) fail_os(errno, text("cannot open the pool's lock '", path, "'"));
  if (::flock(fd.get(), (exclusive ? LOCK_EX : LOCK_SH) | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) fail_os(errno, text("cannot lock '", path, "'"));
    // Readers share the lock and do not sign it.
    if (exclusive && ::flock(fd.get(), LOCK_SH | LOCK_NB) == 0) {
      fail(ErrorKind::kLocked, "pool '", folder,
           "' is being read by another process (verify, evaluate, predict or the like)\n"
           "  do:    wait until it has ended and start again");
    }
    fail(ErrorKind::kLocked, "pool '", folder, "' is in use by process ", read_owner(fd.get()),
         "\n  do:    wait for it or end it; meanwhile 'trainingcxl inspect' reads the pool, and "
         "'trainingcxl snapshot' copies it while it is trained");
  }
  return fd;
}

void sign_lock(const Fd& fd) {
  const std::string pid = std::to_string(::getpid());
  if (::ftruncate(fd.get(), 0) != 0 || ::pwrite(fd.get(), pid.data(), pid.size(), 0) < 0) {
    fail_os(errno, "cannot write the pool's lock file");
  }
}

}  // namespace tcxl
