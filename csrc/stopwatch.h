#pragma once

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
