// Runs a communicator's operations one after the other, beside the caller.
//
// A thread that waits for an operation which has not begun, and finds no other under way, performs what is queued
// up to it: handing a small operation to another thread and back costs more than the
// operation.
//
// After the first operation that throws, all later ones fail with the same error: ranks that went
// out of step must not go on exchanging bytes.
//
// Threads: run() is called by one thread at a time; tasks run one at a time, on the thread that this
// class owns, which charges the ledger that was current where the ProgressThread was made, or on a
// thread that waits.
#pragma once

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "zeropage/detail/pending.h"

namespace zeropage::comm::detail {

class ProgressThread {
 public:
  ProgressThread();
  // Fails what has not begun and joins; the owner must have woken a task that blocks.
  ~ProgressThread();

  memory::Pending run(std::function<void()> task, std::vector<at::Tensor> buffers);

 private:
  class Queue;

  // Shared with what waits: a Pending may outlive the communicator.
  const std::shared_ptr<Queue> queue_;
  std::thread thread_;
};

}  // namespace zeropage::comm::detail
