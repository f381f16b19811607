#include "workers.h"

#include "kernels.h"

namespace tcxl {

Workers::Workers(int num_threads) {
  for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this] { loop(); });
}

Workers::~Workers() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Workers::take_part() {
  for (uint64_t i = next_.fetch_add(1); i < count_; i = next_.fetch_add(1)) (*body_)(i);
}

void Workers::loop() {
  FloatMode float_mode;
  uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [&] { return stop_ || generation_ != seen; });
    if (stop_) return;
    seen = generation_;
    if (body_ == nullptr) continue;  // the loop ended before this thread woke up
    ++active_;
    lock.unlock();
    take_part();
    lock.lock();
    if (--active_ == 0) done_.notify_all();
  }
}

void Workers::run(uint64_t count, const std::function<void(uint64_t)>& body,
                  bool is_worth_sharing) {
  FloatMode float_mode;
  if (threads_.empty() || count <= 1 || !is_worth_sharing) {
    for (uint64_t i = 0; i < count; ++i) body(i);
    return;
  }
  {
    std::lock_guard lock(mutex_);
    body_ = &body;
    count_ = count;
    next_ = 0;
    ++generation_;
  }
  wake_.notify_all();
  take_part();
  std::unique_lock lock(mutex_);
  done_.wait(lock, [&] { return active_ == 0; });
  body_ = nullptr;
}

}  // namespace tcxl
