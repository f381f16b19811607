// The engine's own threads: short parallel loops, the caller takes part. Every thread runs in the
// fixed float mode.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace tcxl {

class Workers {
 public:
  explicit Workers(int num_threads);  // including the caller
  ~Workers();
  int num_threads() const { return static_cast<int>(threads_.size()) + 1; }
  // Calls body(i) for i in [0, count), in any order, and returns when all are done. Not worth
  // sharing: the caller does all of it.
  void run(uint64_t count, const std::function<void(uint64_t)>& body, bool is_worth_sharing = true);

 private:
  void loop();
  void take_part();
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  const std::function<void(uint64_t)>* body_ = nullptr;
  std::atomic<uint64_t> next_{0};
  uint64_t count_ = 0;
  uint64_t generation_ = 0;
  int active_ = 0;
  bool stop_ = false;
};

}  // namespace tcxl
