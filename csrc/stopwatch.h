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

}  // namespace tcxl
