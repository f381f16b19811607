#include "bus_error.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <mutex>

namespace tcxl {

namespace {

// Fixed size and lock free: the handler may run in any thread, at any instruction.
struct Watched {
  std::atomic<const std::byte*> base;
  std::atomic<uint64_t> bytes, file_offset;
  char path[488];
};
std::array<Watched, 256> g_watched;
std::mutex g_watched_mutex;  // of those who enter and leave; the handler only reads
struct sigaction g_before;
std::atomic<bool> g_has_begun, g_is_said;

// One line of text without a function that a signal handler must not call.
class Message {
 public:
  Message& add(const char* text) {
    const size_t n = std::min(std::strlen(text), sizeof buffer_ - used_);
    std::memcpy(buffer_ + used_, text, n);
    used_ += n;
    return *this;
  }
  Message& add(uint64_t number) {
    char digits[24] = {};
    char* at = digits + sizeof digits - 1;
    do {
      *--at = static_cast<char>('0' + number % 10);
      number /= 10;
    } while (number > 0);
    return add(at);
  }
  void send() const {
    if (::write(STDERR_FILENO, buffer_, used_) < 0) return;  // nobody is left to be told
  }

 private:
  char buffer_[1600];
  size_t used_ = 0;
};

void explain(const Watched& w, const std::byte* at, bool is_memory) {
  const auto offset = static_cast<uint64_t>(at - w.base.load());
  const char* why = is_memory ? "the memory there is bad (see the kernel's log)"
                              : "the file was cut by another program, or its medium cannot be read";
  Message()
      .add("\ntrainingcxl: bus error at byte ")
      .add(w.file_offset.load() + offset)
      .add(" of '")
      .add(w.path)
      .add("': ")
      .add(why)
      .add("\n  state: this process ends now; the pool needs the file's first ")
      .add(w.file_offset.load() + w.bytes.load())
      .add(" bytes\n  do:    compare the file's size and look at the kernel's log (dmesg); ")
      .add("'trainingcxl verify' on the pool says what is damaged; restore what is, then run the ")
      .add("same command\n")
      .send();
}

// The second thread to come here waits for the first one's message, for a second at most.
void explain_once(const Watched& w, const std::byte* at, bool is_memory) {
  if (!g_has_begun.exchange(true)) {
    explain(w, at, is_memory);
    g_is_said = true;
  }
  const timespec moment{0, 1000000};
  for (int i = 0; i < 1000 && !g_is_said; ++i) ::nanosleep(&moment, nullptr);
}

void on_bus_error(int number, siginfo_t* info, void* context) {
  const bool was_sent = info->si_code <= 0;  // by kill(): then no address comes with it
  const auto* at = static_cast<const std::byte*>(info->si_addr);
  const bool is_again = g_is_said;
  for (const Watched& w : g_watched) {
    const std::byte* base = w.base.load();
    if (was_sent || base == nullptr || at < base || at >= base + w.bytes.load()) continue;
    explain_once(w, at, info->si_code == BUS_MCEERR_AR || info->si_code == BUS_MCEERR_AO);
    break;
  }
  const bool has_handler = g_before.sa_handler != SIG_DFL && g_before.sa_handler != SIG_IGN;
  if (has_handler && !is_again) {  // one that returned last time would be called for ever
    if ((g_before.sa_flags & SA_SIGINFO) != 0) return g_before.sa_sigaction(number, info, context);
    return g_before.sa_handler(number);
  }
  // The access is repeated on return, and ends the process where it happened.
  struct sigaction by_default = {};
  by_default.sa_handler = SIG_DFL;
  ::sigaction(SIGBUS, &by_default, nullptr);
  if (was_sent) ::raise(SIGBUS);
}

void install() {
  struct sigaction ours = {};
  ours.sa_sigaction = on_bus_error;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  ::sigemptyset(&ours.sa_mask);
  ::sigaction(SIGBUS, &ours, &g_before);
}

}  // namespace

void explain_bus_errors(const std::byte* base, uint64_t bytes, uint64_t file_offset,
                        const std::string& path) {
  static std::once_flag installed;
  std::call_once(installed, install);
  const std::lock_guard lock(g_watched_mutex);
  Watched* place = nullptr;
  for (Watched& w : g_watched) {
    if (w.base == base) place = &w;
    if (w.base == nullptr && place == nullptr) place = &w;
  }
  if (place == nullptr) return;  // so many pools: the last ones end without a word
  if (place->base != base) {
    const size_t n = std::min(path.size(), sizeof place->path - 1);
    std::memcpy(place->path, path.data(), n);
    place->path[n] = '\0';
  }
  place->bytes = bytes;
  place->file_offset = file_offset;
  place->base = base;
}

void forget_bus_errors(const std::byte* base) {
  if (base == nullptr) return;
  for (Watched& w : g_watched) {
    const std::byte* expected = base;
    if (w.base.compare_exchange_strong(expected, nullptr)) return;
  }
}

}  // namespace tcxl
