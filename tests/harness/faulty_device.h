// A block device that errs where it is told to, and says what was asked of it.
//
// Lifetime: the script is shared; it outlives the file that the device belongs to.
// Threads: the script is anybody's.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "offload/detail/block_device.h"
#include "offload/detail/wrapped_disk.h"

namespace zeropage::testing {

using offload::detail::BlockDevice;
using offload::detail::Completion;
using offload::detail::Direction;
using offload::detail::Transfer;

struct DeviceScript {
  struct Fault {
    Direction direction = Direction::kRead;
    int first = 0;  // which transfer of that direction, from 0
    int count = 1;  // how many from there on
    int error = 0;  // an errno; 0: the transfer is short
    int64_t short_bytes = 0;
    bool lies = false;  // says that it wrote, and did not
  };
  std::vector<Fault> faults;
  std::chrono::microseconds delay{0};  // of each transfer, one after the other

  std::mutex mutex;
  // Guarded by mutex.
  int reads = 0;  // that were submitted
  int writes = 0;
  std::vector<Transfer> submitted;

  const Fault* next_fault(Direction direction) {
    const int number = direction == Direction::kRead ? reads++ : writes++;
    for (const Fault& fault : faults) {
      const bool hits = number >= fault.first && number < fault.first + fault.count;
      if (fault.direction == direction && hits) return &fault;
    }
    return nullptr;
  }
};

class FaultyDevice : public BlockDevice {
 public:
  FaultyDevice(std::unique_ptr<BlockDevice> device, std::shared_ptr<DeviceScript> script)
      : device_(std::move(device)), script_(std::move(script)) {}

  int depth() const override { return device_->depth(); }

  void submit(const Transfer& transfer) override {
    const std::lock_guard lock(script_->mutex);
    script_->submitted.push_back(transfer);
    const DeviceScript::Fault* fault = script_->next_fault(transfer.direction);
    if (fault == nullptr) return device_->submit(transfer);
    if (fault->lies) return ended_.push_back({transfer.tag, transfer.bytes});
    if (fault->error != 0) return ended_.push_back({transfer.tag, -fault->error});
    if (fault->short_bytes == 0) return ended_.push_back({transfer.tag, 0});
    Transfer part = transfer;
    part.bytes = std::min(transfer.bytes, fault->short_bytes);
    device_->submit(part);
  }

  Completion wait() override {
    std::this_thread::sleep_for(script_->delay);
    if (ended_.empty()) return device_->wait();
    const Completion completion = ended_.front();
    ended_.pop_front();
    return completion;
  }

  std::string describe() const override { return device_->describe() + " with faults"; }

 private:
  const std::unique_ptr<BlockDevice> device_;
  const std::shared_ptr<DeviceScript> script_;
  std::deque<Completion> ended_;
};

// For WrappedDisk (offload/detail/wrapped_disk.h).
inline auto faulty(const std::shared_ptr<DeviceScript>& script) {
  return [script](std::unique_ptr<BlockDevice> device) -> std::unique_ptr<BlockDevice> {
    return std::make_unique<FaultyDevice>(std::move(device), script);
  };
}

}  // namespace zeropage::testing
