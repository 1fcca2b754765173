// Streams and events of an accelerator. A host has none: there the same code does nothing, and no
// caller asks.
//
// The work of a stream runs in order, beside the other streams and the host. An event is a point in
// it: another stream, or the host, waits for everything enqueued before that point. These two are
// all the ordering there is; nothing synchronises a whole device, and no block of memory is marked as used by a
// stream (`recordStream`), which would make the time of its release depend on timing.
//
// Written over LibTorch's device-generic streams, so it knows no CUDA. In a simulated world (the meta device) a
// stream is a number: nothing is enqueued, but records of memory say for which stream it is.
// Threads: any; a Stream and an Event are values.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

namespace zeropage::device {

// Whether work on that device is enqueued to streams.
bool has_streams(c10::DeviceType device);

class Event {
 public:
  // Whether it has passed.
  Event() = default;

  bool passed() const { return !event_ || event_->query(); }
  // Blocks the calling thread until it has passed.
  void synchronize() const {
    if (event_) event_->synchronize();
  }

 private:
  friend class Stream;
  explicit Event(std::shared_ptr<const c10::Event> event) : event_(std::move(event)) {}

  std::shared_ptr<const c10::Event> event_;  // null on a host
};

class Stream {
 public:
  // No stream.
  Stream() = default;

  // The one that the calling thread's operators on that device are enqueued to.
  static Stream current(c10::Device device);
  // Another one, from LibTorch's pool of them.
  static Stream another(c10::Device device);

  // A point after what is enqueued now.
  Event record() const;
  // What is enqueued from here on begins after the event has passed.
  void wait(const Event& event) const;
  // What is enqueued from here on begins after what is enqueued to `other` now.
  void wait_for(const Stream& other) const { wait(other.record()); }

  friend bool operator==(const Stream& left, const Stream& right) {
    return left.stream_ == right.stream_ && left.simulated_ == right.simulated_;
  }

 private:
  friend class StreamScope;
  explicit Stream(c10::Stream stream) : stream_(stream) {}
  explicit Stream(int64_t simulated) : simulated_(simulated) {}

  std::optional<c10::Stream> stream_;
  int64_t simulated_ = 0;
};

// The number of the calling thread's current stream on the meta device; 0 outside of any StreamScope. Another stream
// than that of compute has a number above 0.
int64_t simulated_stream();

// While it lives, the stream is the calling thread's current one: operators are enqueued to it, and
// memory is allocated for it, to be reused in its order.
class StreamScope {
 public:
  explicit StreamScope(const Stream& stream);
  ~StreamScope();
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
  c10::OptionalStreamGuard guard_;
  const int64_t simulated_before_;
};

}  // namespace zeropage::device
