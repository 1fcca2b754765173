#include "comm/devices/device_watch.h"

#include <pthread.h>
#include <utility>

#include "zeropage/check.h"
#include "zeropage/ledger.h"

namespace zeropage::comm::detail {

DeviceWatch::DeviceWatch(Options options)
    : options_(std::move(options)), next_(options_.watch, options_.lost_ranks) {
  thread_ = std::thread([this, ledger = memory::Ledger::current()] {
    pthread_setname_np(pthread_self(), "zp-device-watch");
    const memory::LedgerScope scope(ledger);
    look_until_stopped();
  });
}

void DeviceWatch::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (!thread_.joinable()) return;
  thread_.join();
  next_.end();
}

void DeviceWatch::add(Call call, device::Event begun, device::Event end) {
  bool was_asleep = false;
  {
    const std::lock_guard lock(mutex_);
    was_asleep = entries_.empty();
    entries_.push_back({std::move(call), std::move(begun), std::move(end)});
  }
  if (was_asleep) changed_.notify_all();
}

void DeviceWatch::check() const {
  const std::lock_guard lock(mutex_);
  if (error_) std::rethrow_exception(error_);
}

void DeviceWatch::fail(const Call& call, const std::string& what_went_wrong) {
  keep(call, what_went_wrong);
  check();
  TORCH_INTERNAL_ASSERT(false, "an error was kept");
}

bool DeviceWatch::is_idle(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, limit, [this] { return error_ || entries_.empty() || stopping_; });
  return !error_ && entries_.empty();
}

void DeviceWatch::look_until_stopped() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    changed_.wait(lock, [this] { return stopping_ || (!entries_.empty() && !error_); });
    while (!stopping_ && !entries_.empty() && !error_) {
      const Entry entry = entries_.front();
      lock.unlock();
      // Neither the device nor the ranks are asked under the lock: who adds must not wait for them.
      std::string wrong;
      bool has_ended = false;
      try {
        has_ended = entry.end.passed();
        if (!has_ended && entry.begun.passed()) wrong = next_.look(entry.call);
      } catch (const std::exception& error) {
        wrong = c10::str("the device failed: ", memory::message_of(error));
      }
      if (!wrong.empty()) keep(entry.call, wrong);
      if (has_ended) next_.end();
      lock.lock();
      if (has_ended) {
        entries_.pop_front();
        if (entries_.empty()) changed_.notify_all();
      } else if (!error_) {
        changed_.wait_for(lock, kBetweenLooks, [this] { return stopping_; });
      }
    }
  }
}

void DeviceWatch::keep(const Call& call, const std::string& what_went_wrong) {
  {
    const std::lock_guard lock(mutex_);
    if (error_) return;
    error_ = std::make_exception_ptr(
        c10::Error({__func__, __FILE__, __LINE__},
                   c10::str(memory::owner_prefix(), call.describe(), ": ", what_went_wrong)));
  }
  changed_.notify_all();
  if (options_.watch) options_.watch->fail_group({what_went_wrong, call.describe()});
  try {
    if (options_.abort) options_.abort();
  } catch (const std::exception&) {
    // What is kept says more than that its consequences could not be stopped.
  }
}

}  // namespace zeropage::comm::detail
