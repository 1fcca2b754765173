// Streams of the fake accelerator: a queue and a thread each; and its events.
//
// Lifetime: streams live until the process ends. Threads: any.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <string>

#include <c10/core/Stream.h>

namespace zeropage::testing {

using Task = std::function<void()>;

class FakeStream {
 public:
  explicit FakeStream(c10::Stream stream);
  FakeStream(const FakeStream&) = delete;
  FakeStream& operator=(const FakeStream&) = delete;

  // what: names the task in its error.
  void enqueue(std::string what, Task task);
  // Waits for what is enqueued so far; throws nothing of it.
  void wait();
  bool is_idle();

 private:
  struct Entry {
    std::string what;
    Task task;
  };
  void run();
  void run_one(const Entry& entry);
  void sleep_as_told();

  const c10::Stream stream_;

  // Owned by the stream's thread.
  std::mt19937_64 random_;
  uint64_t delays_version_ = 0;

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::deque<Entry> entries_;
  uint64_t enqueued_ = 0;
  uint64_t done_ = 0;
};

// Made at its first use.
FakeStream& fake_stream(c10::Stream stream);
c10::Stream current_fake_stream(c10::DeviceIndex device);

// Waits for every stream of the device.
void wait_for_fake_device(c10::DeviceIndex device);

// Throws the first error of the device's tasks since the last call.
void rethrow_task_error(c10::DeviceIndex device);

class FakeEvent {
 public:
  using Clock = std::chrono::steady_clock;

  // The version that is reached when the stream comes to what is enqueued now.
  uint64_t begin_record(c10::DeviceIndex device);
  void reach(uint64_t version);
  // The version recorded last, 0: none.
  uint64_t recorded();
  void wait(uint64_t version);
  bool has_reached(uint64_t version);
  c10::DeviceIndex device();
  Clock::time_point reached_at();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  uint64_t recorded_ = 0;
  uint64_t reached_ = 0;
  c10::DeviceIndex device_ = 0;
  Clock::time_point reached_at_;
};

}  // namespace zeropage::testing
