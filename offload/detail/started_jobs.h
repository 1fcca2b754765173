// Operations that callers have started and that the worker's thread has not taken.
//
// Threads: take() is the worker's, the others are anybody's.
#pragma once

#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>

#include "offload/detail/record_job.h"

namespace zeropage::offload::detail {

using RecordJobs = std::list<std::unique_ptr<RecordJob>>;

class StartedJobs {
 public:
  void add(std::unique_ptr<RecordJob> job);
  // Says that no job will be added any more.
  void close();

  // Moves them to the end of `jobs`. waits: until there is one. False when nothing is left and nothing
  // will come.
  bool take(RecordJobs& jobs, bool waits);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  RecordJobs started_;
  bool closed_ = false;
};

}  // namespace zeropage::offload::detail
