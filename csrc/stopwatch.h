#pragma once

#include <time.h>

#include <chrono>
#include <cstdint>

namespace tcxl {

class Stopwatch {
 public:
  uint64_t ns() const {
    return static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start_).count());
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

// What all threads of this process have computed since.
class ProcessorTime {
 public:
  uint64_t ns() const { return now() - start_; }

 private:
  static uint64_t now() {
    timespec t{};
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return static_cast<uint64_t>(t.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(t.tv_nsec);
  }
  uint64_t start_ = now();
};

// Adds the time until the end of the scope to a counter.
class Busy {
 public:
  explicit Busy(uint64_t& total) : total_(total) {}
  ~Busy() { total_ += watch_.ns(); }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;

 private:
  uint64_t& total_;
  Stopwatch watch_;
};

}  // namespace tcxl
