#include "tests/harness/fake_accelerator/stream.h"

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <sys/prctl.h>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include "tests/harness/fake_accelerator/fake_accelerator.h"
#include "zeropage/check.h"

namespace zeropage::testing {
namespace {

struct Delays {
  std::atomic<uint64_t> version{0};
  std::atomic<uint64_t> seed{0};
  std::atomic<int64_t> longest_us{0};
};

// What streams of one device share.
struct FakeDevice {
  std::mutex mutex;
  // Guarded by mutex.
  std::map<c10::StreamId, std::unique_ptr<FakeStream>> streams;
  std::optional<std::string> error;
};

// Never destroyed: the streams' threads do not end before the process.
Delays& delays() {
  static auto* const delays = new Delays;
  return *delays;
}

FakeDevice& device(c10::DeviceIndex index) {
  static auto* const devices = new std::array<FakeDevice, kFakeDevices>;
  return devices->at(static_cast<size_t>(index));
}

}  // namespace

FakeStream::FakeStream(c10::Stream stream) : stream_(stream) {
  std::thread([this] { run(); }).detach();
}

void FakeStream::enqueue(std::string what, Task task) {
  {
    const std::lock_guard lock(mutex_);
    entries_.push_back({std::move(what), std::move(task)});
    ++enqueued_;
  }
  changed_.notify_all();
}

void FakeStream::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this, until = enqueued_] { return done_ >= until; });
}

bool FakeStream::is_idle() {
  const std::lock_guard lock(mutex_);
  return done_ == enqueued_;
}

void FakeStream::run() {
  // One thread, so the bits do not depend on the machine; below autograd, as a kernel is.
  at::set_num_threads(1);
  // Else the system adds 50 us to every delay.
  prctl(PR_SET_TIMERSLACK, 1);
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below;
  for (;;) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !entries_.empty(); });
    Entry entry = std::move(entries_.front());
    entries_.pop_front();
    lock.unlock();
    sleep_as_told();
    run_one(entry);
    // What the task owned goes before anybody takes it for done.
    entry = {};
    lock.lock();
    ++done_;
    lock.unlock();
    changed_.notify_all();
  }
}

void FakeStream::run_one(const Entry& entry) {
  try {
    entry.task();
  } catch (const std::exception& error) {
    FakeDevice& mine = device(stream_.device_index());
    const std::lock_guard lock(mine.mutex);
    if (mine.error) return;
    mine.error = c10::str(stream_.device(), ": ", entry.what, ", a task of stream ", stream_.id(),
                          ", failed: ", memory::message_of(error));
  }
}

void FakeStream::sleep_as_told() {
  const uint64_t version = delays().version;
  const int64_t longest_us = delays().longest_us;
  if (longest_us == 0) return;
  if (version != delays_version_) {
    const auto which = static_cast<uint64_t>(stream_.id() * kFakeDevices + stream_.device_index());
    random_.seed(delays().seed * 1000003 + which);
    delays_version_ = version;
  }
  // Each sleep costs more than a small task: streams that drift apart now and then show as much.
  if (random_() % 4 != 0) return;
  const auto delay = std::uniform_int_distribution<int64_t>(0, longest_us)(random_);
  std::this_thread::sleep_for(std::chrono::microseconds(delay));
}

FakeStream& fake_stream(c10::Stream stream) {
  FakeDevice& its = device(stream.device_index());
  const std::lock_guard lock(its.mutex);
  auto& found = its.streams[stream.id()];
  if (!found) found = std::make_unique<FakeStream>(stream);
  return *found;
}

void wait_for_fake_device(c10::DeviceIndex index) {
  std::vector<FakeStream*> streams;
  {
    const std::lock_guard lock(device(index).mutex);
    for (const auto& [id, stream] : device(index).streams) streams.push_back(stream.get());
  }
  for (FakeStream* stream : streams) stream->wait();
}

void rethrow_task_error(c10::DeviceIndex index) {
  std::optional<std::string> error;
  {
    const std::lock_guard lock(device(index).mutex);
    error = std::exchange(device(index).error, std::nullopt);
  }
  TORCH_CHECK(!error, *error);
}

void set_fake_delays(uint64_t seed, std::chrono::microseconds longest) {
  delays().seed = seed;
  delays().longest_us = longest.count();
  ++delays().version;
}

struct HeldStream::Gate {
  std::mutex mutex;
  std::condition_variable changed;
  bool open = false;  // guarded by mutex
};

HeldStream::HeldStream(c10::Stream stream) : gate_(std::make_shared<Gate>()) {
  fake_stream(stream).enqueue("a test's gate", [gate = gate_] {
    std::unique_lock lock(gate->mutex);
    gate->changed.wait(lock, [&] { return gate->open; });
  });
}

HeldStream::~HeldStream() {
  const std::lock_guard lock(gate_->mutex);
  gate_->open = true;
  gate_->changed.notify_all();
}

uint64_t FakeEvent::begin_record(c10::DeviceIndex device) {
  const std::lock_guard lock(mutex_);
  device_ = device;
  return ++recorded_;
}

void FakeEvent::reach(uint64_t version) {
  {
    const std::lock_guard lock(mutex_);
    reached_ = std::max(reached_, version);
    reached_at_ = Clock::now();
  }
  changed_.notify_all();
}

uint64_t FakeEvent::recorded() {
  const std::lock_guard lock(mutex_);
  return recorded_;
}

void FakeEvent::wait(uint64_t version) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return reached_ >= version; });
}

bool FakeEvent::has_reached(uint64_t version) {
  const std::lock_guard lock(mutex_);
  return reached_ >= version;
}

c10::DeviceIndex FakeEvent::device() {
  const std::lock_guard lock(mutex_);
  return device_;
}

FakeEvent::Clock::time_point FakeEvent::reached_at() {
  const std::lock_guard lock(mutex_);
  return reached_at_;
}

}  // namespace zeropage::testing
