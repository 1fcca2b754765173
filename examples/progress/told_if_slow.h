// Tells that something is going on, where it takes long.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace examples {

// While it lives: after that time it calls `tell`, once, on a thread of its own. The destructor waits for it.
class ToldIfSlow {
 public:
  ToldIfSlow(std::chrono::milliseconds after, std::function<void()> tell)
      : tell_(std::move(tell)), thread_([this, after] { wait(after); }) {}
  ~ToldIfSlow() {
    {
      const std::lock_guard lock(mutex_);
      is_over_ = true;
    }
    over_.notify_all();
    thread_.join();
  }
  ToldIfSlow(const ToldIfSlow&) = delete;
  ToldIfSlow& operator=(const ToldIfSlow&) = delete;

 private:
  void wait(std::chrono::milliseconds after) {
    std::unique_lock lock(mutex_);
    if (!over_.wait_for(lock, after, [this] { return is_over_; })) tell_();
  }

  const std::function<void()> tell_;
  std::mutex mutex_;
  std::condition_variable over_;
  bool is_over_ = false;
  std::thread thread_;  // last: it uses the others
};

}  // namespace examples
