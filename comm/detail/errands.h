// What the thread of a watch sleeps for: to stop, and to tell the others that this rank has failed elsewhere.
//
// Threads: any; note() the watch's.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace zeropage::comm::detail {

class Errands {
 public:
  // How far the others have been told.
  enum class Told : uint8_t {
    kNothing,  // there is nothing to tell
    kDue,
    kAccount,  // it lies where they look
    kAll,      // they have had the time to look
  };

  void start();
  // Sleeps that long, or less where something is due. Returns whether to stop.
  bool stops_within(std::chrono::milliseconds time);
  void stop();

  void tell();  // from kNothing to kDue
  bool is_due() const;
  void note(Told told);
  // Does not wait where nothing is to be told, or nobody is there to tell it.
  void wait_until(Told told, std::chrono::milliseconds most);

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  bool running_ = false;
  Told told_ = Told::kNothing;
};

}  // namespace zeropage::comm::detail
