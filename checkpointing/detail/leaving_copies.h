// Copies that are on their way from a device to the host, the oldest first.
//
// Lifetime: owns what the copies read and write.
// Threads: guarded by the ActivationOffloader's mutex.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "device/stream.h"

namespace zeropage::checkpointing::detail {

struct LeavingCopy {
  int64_t place = 0;  // in the order in which copies began
  device::Event end;
  int64_t bytes = 0;
  std::vector<at::Tensor> buffers;  // what it reads and writes
};

class LeavingCopies {
 public:
  bool empty() const { return copies_.empty(); }
  int64_t bytes() const { return bytes_; }
  // REQUIRES: not empty.
  const device::Event& oldest_end() const { return copies_.front().end; }

  void add(LeavingCopy copy) {
    bytes_ += copy.bytes;
    copies_.push_back(std::move(copy));
  }
  // Those from the oldest on that have ended.
  std::vector<LeavingCopy> take_ended() {
    std::vector<LeavingCopy> ended;
    while (!copies_.empty() && copies_.front().end.passed()) {
      bytes_ -= copies_.front().bytes;
      ended.push_back(std::move(copies_.front()));
      copies_.pop_front();
    }
    return ended;
  }
  // Forgets the copy of that place, if it is one; gives its buffers.
  std::vector<at::Tensor> forget(int64_t place) {
    const auto copy = std::find_if(copies_.begin(), copies_.end(),
                                   [place](const LeavingCopy& one) { return one.place == place; });
    if (copy == copies_.end()) return {};
    bytes_ -= copy->bytes;
    std::vector<at::Tensor> buffers = std::move(copy->buffers);
    copies_.erase(copy);
    return buffers;
  }

 private:
  std::deque<LeavingCopy> copies_;
  int64_t bytes_ = 0;
};

}  // namespace zeropage::checkpointing::detail
