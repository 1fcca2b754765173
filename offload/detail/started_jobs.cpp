#include "offload/detail/started_jobs.h"

#include <utility>

namespace zeropage::offload::detail {

void StartedJobs::add(std::unique_ptr<RecordJob> job) {
  {
    const std::lock_guard lock(mutex_);
    started_.push_back(std::move(job));
  }
  changed_.notify_one();
}

void StartedJobs::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_one();
}

bool StartedJobs::take(RecordJobs& jobs, bool waits) {
  std::unique_lock lock(mutex_);
  if (waits) {
    changed_.wait(lock, [this] { return closed_ || !started_.empty(); });
    if (started_.empty()) return false;
  }
  jobs.splice(jobs.end(), started_);
  return true;
}

}  // namespace zeropage::offload::detail
