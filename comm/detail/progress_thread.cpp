#include "comm/detail/progress_thread.h"

#include <condition_variable>
#include <deque>
#include <exception>
#include <future>
#include <mutex>
#include <pthread.h>
#include <utility>

#include "comm/detail/broken_pipe.h"
#include "comm/watch/announced_call.h"
#include "zeropage/check.h"
#include "zeropage/ledger.h"

namespace zeropage::comm::detail {

class ProgressThread::Queue {
 public:
  // Returns the job's number.
  uint64_t add(std::function<void()> task, std::promise<void> done) {
    std::unique_lock lock(mutex_);
    jobs_.push_back({std::move(task), std::move(done)});
    const uint64_t number = added_++;
    lock.unlock();
    wake_.notify_one();
    return number;
  }

  // Performs jobs until stop().
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return !performing_ && (stopping_ || !jobs_.empty()); });
      if (jobs_.empty()) return;
      perform_next(lock);
    }
  }

  // Performs jobs up to that one, or until another thread performs one.
  void help(uint64_t number) {
    std::unique_lock lock(mutex_);
    while (!performing_ && !jobs_.empty() && added_ - jobs_.size() <= number) perform_next(lock);
  }

  void stop() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
  }

 private:
  struct Job {
    std::function<void()> task;
    std::promise<void> done;
  };

  void perform_next(std::unique_lock<std::mutex>& lock) {
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    performing_ = true;
    if (stopping_ && !first_error_) {
      first_error_ = std::make_exception_ptr(c10::Error(
          {__func__, __FILE__, __LINE__},
          memory::owner_prefix() + "the communicator was destroyed with operations in flight; "
                                   "wait for them first"));
    }
    lock.unlock();
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
    lock.lock();
    performing_ = false;
    if (stopping_ || !jobs_.empty()) wake_.notify_one();
  }

  // Owned by the thread that performs operations.
  std::exception_ptr first_error_;

  std::mutex mutex_;
  std::condition_variable wake_;
  // Guarded by mutex_.
  std::deque<Job> jobs_;
  uint64_t added_ = 0;
  bool performing_ = false;
  bool stopping_ = false;
};

ProgressThread::ProgressThread() : queue_(std::make_shared<Queue>()) {
  thread_ = std::thread([queue = queue_, ledger = memory::Ledger::current()] {
    pthread_setname_np(pthread_self(), "zp-progress");
    const BrokenPipeScope broken_pipe;
    memory::LedgerScope scope(ledger);
    queue->work();
  });
}

ProgressThread::~ProgressThread() {
  queue_->stop();
  thread_.join();
}

memory::Pending ProgressThread::run(std::function<void()> task, std::vector<at::Tensor> buffers) {
  std::promise<void> done;
  std::shared_future<void> future = done.get_future().share();
  const uint64_t number = queue_->add(AnnouncedCall::told(std::move(task)), std::move(done));
  return {std::move(future), std::move(buffers), [queue = queue_, number] { queue->help(number); }};
}

}  // namespace zeropage::comm::detail
