// Runs a communicator's operations one after the other, beside the caller.
//
// After the first operation that throws, all later ones fail with the same error: ranks that went
// out of step must not go on exchanging bytes.
//
// Threads: run() is called by one thread at a time; tasks run on the thread that this class owns,
// which charges the ledger that was current where the ProgressThread was made.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

#include "memory/pending.h"

namespace zeropage::comm::detail {

class ProgressThread {
 public:
  ProgressThread();
  // Fails what has not begun and joins; the owner must have woken a task that blocks.
  ~ProgressThread();

  memory::Pending run(std::function<void()> task, std::vector<at::Tensor> buffers);

 private:
  struct Job {
    std::function<void()> task;
    std::promise<void> done;
  };
  void work();
  void perform(Job& job);

  // Owned by the progress thread.
  std::exception_ptr first_error_;

  std::mutex mutex_;
  std::condition_variable wake_;
  // Guarded by mutex_.
  std::deque<Job> jobs_;
  bool stopping_ = false;

  std::thread thread_;  // last: starts when everything above is there
};

}  // namespace zeropage::comm::detail
