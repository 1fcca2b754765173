#include "base/rank_threads.h"

#include <atomic>
#include <cstddef>
#include <mutex>
#include <unordered_map>

namespace zeropage::base {
namespace {

// The threads that are ranks. Each operator that draws asks for their number, so it is read without the lock.
class RankThreads {
 public:
  static RankThreads& of_process() {
    // Never destroyed: a world may end after main().
    static auto* const threads = new RankThreads();
    return *threads;
  }

  void add(std::thread::id thread) {
    const std::lock_guard lock(mutex_);
    ++worlds_[thread];
    count_ = worlds_.size();
  }
  void remove(std::thread::id thread) {
    const std::lock_guard lock(mutex_);
    const auto found = worlds_.find(thread);
    if (--found->second == 0) worlds_.erase(found);
    count_ = worlds_.size();
  }
  size_t count() const { return count_; }

 private:
  std::mutex mutex_;
  std::unordered_map<std::thread::id, int> worlds_;  // guarded by mutex_
  std::atomic<size_t> count_ = 0;
};

}  // namespace

RankThread::RankThread() : thread_(std::this_thread::get_id()) {
  RankThreads::of_process().add(thread_);
}

RankThread::~RankThread() {
  RankThreads::of_process().remove(thread_);
}

bool ranks_are_threads() {
  return RankThreads::of_process().count() > 1;
}

}  // namespace zeropage::base
