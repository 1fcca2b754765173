#include "comm/detail/progress_thread.h"

#include <pthread.h>
#include <utility>

#include "comm/detail/broken_pipe.h"
#include "memory/check.h"
#include "memory/ledger.h"

namespace zeropage::comm::detail {

ProgressThread::ProgressThread() {
  thread_ = std::thread([this, ledger = memory::Ledger::current()] {
    pthread_setname_np(pthread_self(), "zp-progress");
    const BrokenPipeScope broken_pipe;
    memory::LedgerScope scope(ledger);
    work();
  });
}

ProgressThread::~ProgressThread() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

memory::Pending ProgressThread::run(std::function<void()> task, std::vector<at::Tensor> buffers) {
  Job job{std::move(task), {}};
  memory::Pending pending(job.done.get_future().share(), std::move(buffers));
  {
    std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  wake_.notify_one();
  return pending;
}

void ProgressThread::work() {
  for (;;) {
    std::unique_lock lock(mutex_);
    wake_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    const bool stopping = stopping_;
    lock.unlock();
    if (stopping && !first_error_) {
      first_error_ = std::make_exception_ptr(c10::Error(
          {__func__, __FILE__, __LINE__},
          memory::owner_prefix() + "the communicator was destroyed with operations in flight; "
                                   "wait for them first"));
    }
    perform(job);
  }
}

void ProgressThread::perform(Job& job) {
  if (!first_error_) {
    try {
      job.task();
    } catch (...) {
      first_error_ = std::current_exception();
    }
  }
  // The task may own buffers whose destruction the waiter expects to have happened.
  job.task = nullptr;
  if (first_error_) {
    job.done.set_exception(first_error_);
  } else {
    job.done.set_value();
  }
}

}  // namespace zeropage::comm::detail
