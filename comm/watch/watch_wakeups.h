// Reasons that wake the thread of a watch: to stop, and to announce that this rank has failed elsewhere.
//
// Threads: any; note() the watch's.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace zeropage::comm::detail {

class WatchWakeups {
 public:
  // How far the failure has been announced.
  enum class Announced : uint8_t {
    kNothing,  // there is nothing to tell
    kDue,
    kReason,  // it lies where they look
    kAll,     // they have had the time to look
  };

  void start();
  // Sleeps that long, or less where something is due. Returns whether to stop.
  bool stops_within(std::chrono::milliseconds time);
  void stop();

  void tell();  // from kNothing to kDue
  bool is_due() const;
  void note(Announced announced);
  // Does not wait if nothing is to be announced, or if the thread does not run.
  void wait_until(Announced announced, std::chrono::milliseconds most);

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  bool running_ = false;
  Announced announced_ = Announced::kNothing;
};

}  // namespace zeropage::comm::detail
