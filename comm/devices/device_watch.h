// Looks after a communicator's operations on a device, which nobody on the host waits for: notices one
// that does not end, and says whose fault it is.
//
// Operations end in the order in which they are added. An operation's time begins when its event
// `begun` has passed and the operation before it has ended: how far the host is ahead of the device
// does not count. One that cannot end (comm/watch/watch.h has why), or is under way a second after a
// rank was lost, fails: what went wrong is kept for check(), and `abort` is called so that the device
// comes free.
//
// Lifetime: what the functions of Options use must outlive it.
// Threads: add() by one at a time, check() by any. Its own, `zp-device-watch`, charges the ledger of
// who made it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/detail/call.h"
#include "comm/devices/device_wait.h"
#include "comm/watch/watch.h"
#include "device/stream.h"

namespace zeropage::comm::detail {

class DeviceWatch {
 public:
  struct Options {
    // Finds out why an operation does not end; null: nobody waits for other ranks.
    std::shared_ptr<Watch> watch;
    // What they are called. Asked every kBetweenLooks while an operation is under way; may be empty.
    std::function<std::vector<int>()> lost_ranks;
    // Called once, after check() has begun to throw, by the watch's thread or fail(). May be empty.
    std::function<void()> abort;
  };
  // How late an end may be noticed.
  static constexpr std::chrono::milliseconds kBetweenLooks{20};

  explicit DeviceWatch(Options options);
  ~DeviceWatch() { stop(); }

  // Forgets what is under way and uses Options no more. check() still works.
  void stop();

  // begun: what the operation waits for on this device; end: its end.
  void add(Call call, device::Event begun, device::Event end);

  // Throws the first error, at every call.
  void check() const;
  // An error that was noticed elsewhere, when the operation was begun: throws it, or an earlier one.
  [[noreturn]] void fail(const Call& call, const std::string& what_went_wrong);

  // Whether all operations have ended, and well. Waits for that up to `limit`.
  bool is_idle(std::chrono::milliseconds limit = {});

 private:
  struct Entry {
    Call call;
    device::Event begun;
    device::Event end;
  };

  void look_until_stopped();
  void keep(const Call& call, const std::string& what_went_wrong);

  // Constant after construction.
  const Options options_;

  // Owned by the watch's thread, and by stop() after it.
  DeviceWait next_;  // for the operation that is next to end

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::deque<Entry> entries_;
  std::exception_ptr error_;
  bool stopping_ = false;

  std::thread thread_;  // last: it uses everything above
};

}  // namespace zeropage::comm::detail
