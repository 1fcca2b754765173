#include "offload/copy_engine.h"

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <future>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include <ATen/ops/empty.h>

#include "device/page_locked.h"
#include "device/pending_on_device.h"
#include "zeropage/check.h"
#include "zeropage/event_sink.h"

namespace zeropage::offload {
namespace {

using memory::Pending;

// The event sink that gets a copy: that of the rank that starts it.
class Observer {
 public:
  using Clock = std::chrono::steady_clock;

  Observer() = default;
  static Observer of_this_thread() {
    Observer observer;
    observer.sink_ = memory::current_sink();
    if (observer.sink_) observer.of_ = memory::OwnerScope::current().page;
    return observer;
  }

  void tell(Direction direction, size_t bytes, Clock::time_point begin) const {
    if (!sink_) return;
    sink_->on_span({.what = memory::Span::What::kCopy,
                    .name = direction == Direction::kToHost ? "copy to host" : "copy to device",
                    .of = of_,
                    .bytes = static_cast<int64_t>(bytes),
                    .begin = begin,
                    .end = Clock::now()});
  }

 private:
  std::shared_ptr<memory::EventSink> sink_;  // null: nobody looks
  std::string of_;
};

// What happens in order, on a thread of its own.
class Queue {
 public:
  Queue(Direction direction, int64_t bytes_per_second)
      : direction_(direction), bytes_per_second_(bytes_per_second), thread_([this] { run(); }) {}
  ~Queue() {
    {
      const std::lock_guard lock(mutex_);
      ends_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  Pending push(const at::Tensor& to, const at::Tensor& from, const Pending& after) {
    Copy copy{to, from, after, std::promise<void>(), Observer::of_this_thread()};
    Pending pending(copy.done.get_future().share(), {to, from});
    {
      const std::lock_guard lock(mutex_);
      copies_.push_back(std::move(copy));
    }
    changed_.notify_one();
    return pending;
  }

 private:
  struct Copy {
    at::Tensor to;
    at::Tensor from;
    Pending after;
    std::promise<void> done;
    Observer observer;
  };

  void run() {
    while (true) {
      Copy copy;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return ends_ || !copies_.empty(); });
        if (copies_.empty()) return;
        copy = std::move(copies_.front());
        copies_.pop_front();
      }
      perform(copy);
    }
  }

  void perform(Copy& copy) const {
    try {
      copy.after.wait();
      const auto begin = std::chrono::steady_clock::now();
      // Not at::copy_, which would take LibTorch's threads from compute.
      std::memcpy(copy.to.mutable_data_ptr(), copy.from.const_data_ptr(), copy.from.nbytes());
      if (bytes_per_second_ > 0) {
        const std::chrono::duration<double> of_link(static_cast<double>(copy.from.nbytes()) /
                                                    static_cast<double>(bytes_per_second_));
        std::this_thread::sleep_until(
            begin + std::chrono::duration_cast<std::chrono::steady_clock::duration>(of_link));
      }
      copy.observer.tell(direction_, copy.from.nbytes(), begin);
      std::promise<void> done = std::move(copy.done);
      copy = {};
      done.set_value();
    } catch (...) {
      copy.done.set_exception(std::current_exception());
    }
  }

  const Direction direction_;
  const int64_t bytes_per_second_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::deque<Copy> copies_;
  bool ends_ = false;

  std::thread thread_;  // last: it uses the others
};

class HostCopies final : public CopyEngine {
 public:
  explicit HostCopies(int64_t bytes_per_second)
      : to_host_(Direction::kToHost, bytes_per_second),
        to_device_(Direction::kToDevice, bytes_per_second) {}

 private:
  Pending enqueue(Direction direction, const at::Tensor& to, const at::Tensor& from,
                  const Pending& after) override {
    return (direction == Direction::kToHost ? to_host_ : to_device_).push(to, from, after);
  }

  Queue to_host_;
  Queue to_device_;
};

// The engine for tensors without values, in a simulated world. A copied tensor is kept as long as the caller keeps
// the Pending, as by a link that is slow.
class NoCopies final : public CopyEngine {
 public:
  NoCopies() = default;

 private:
  Pending enqueue(Direction /*direction*/, const at::Tensor& to, const at::Tensor& from,
                  const Pending& /*after*/) override {
    return {std::shared_future<void>(), {to, from}};
  }
};

class DeviceCopies final : public CopyEngine {
 public:
  explicit DeviceCopies(c10::Device device)
      : device_(device),
        to_host_(device::Stream::another(device)),
        to_device_(device::Stream::another(device)) {}

  void wait_for_device() const override {
    to_host_.record().synchronize();
    to_device_.record().synchronize();
  }

 private:
  Pending enqueue(Direction direction, const at::Tensor& to, const at::Tensor& from,
                  const Pending& after) override {
    const device::Stream& stream = direction == Direction::kToHost ? to_host_ : to_device_;
    stream.wait_for(device::Stream::current(device_));
    const device::StreamScope on_stream(stream);
    after.wait();
    device::start_copy(to, from);
    Observer::of_this_thread().tell(direction, from.nbytes(), Observer::Clock::now());
    return {Pending::OnDevice{device_, stream.record(), {}}, {to, from}};
  }

  const c10::Device device_;
  const device::Stream to_host_;
  const device::Stream to_device_;
};

}  // namespace

std::unique_ptr<CopyEngine> CopyEngine::make(c10::Device device, const CopyEngineOptions& options) {
  ZP_CHECK(options.bytes_per_second >= 0, "the copy engine's bytes_per_second: expected 0 (no ",
           "limit) or more, got ", options.bytes_per_second);
  if (device.is_meta()) return std::make_unique<NoCopies>();
  if (!device::has_streams(device.type())) {
    return std::make_unique<HostCopies>(options.bytes_per_second);
  }
  ZP_CHECK(options.bytes_per_second == 0, "the copy engine's bytes_per_second: ", device,
           " has a link of its own, whose speed is what it is; leave it 0");
  return std::make_unique<DeviceCopies>(device);
}

Pending CopyEngine::start(Direction direction, const at::Tensor& to, const at::Tensor& from,
                          const Pending& after) {
  TORCH_INTERNAL_ASSERT(to.is_contiguous() && from.is_contiguous() && to.sizes() == from.sizes() &&
                        to.scalar_type() == from.scalar_type());
  bytes_[static_cast<size_t>(direction)] += static_cast<int64_t>(from.nbytes());
  if (from.numel() == 0) return after;
  return enqueue(direction, to, from, after);
}

}  // namespace zeropage::offload
