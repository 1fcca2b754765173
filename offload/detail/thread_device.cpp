#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include <c10/util/StringUtil.h>

#include "offload/detail/block_device.h"

namespace zeropage::offload::detail {
namespace {

constexpr int kMostThreads = 4;

class ThreadDevice : public BlockDevice {
 public:
  ThreadDevice(int descriptor, int depth, std::string reason)
      : descriptor_(descriptor), depth_(depth), reason_(std::move(reason)) {
    for (int i = 0; i < std::min(depth, kMostThreads); ++i) {
      threads_.emplace_back([this] { serve(); });
    }
  }
  ~ThreadDevice() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    to_do_changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  ThreadDevice(const ThreadDevice&) = delete;
  ThreadDevice& operator=(const ThreadDevice&) = delete;

  int depth() const override { return depth_; }

  void submit(const Transfer& transfer) override {
    {
      const std::lock_guard lock(mutex_);
      to_do_.push_back(transfer);
    }
    to_do_changed_.notify_one();
  }

  Completion wait() override {
    std::unique_lock lock(mutex_);
    ended_changed_.wait(lock, [this] { return !ended_.empty(); });
    const Completion completion = ended_.front();
    ended_.pop_front();
    return completion;
  }

  std::string describe() const override {
    return c10::str("pread and pwrite on ", threads_.size(), " threads",
                    reason_.empty() ? "" : ", as the kernel refuses io_uring (" + reason_ + ")");
  }

 private:
  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      to_do_changed_.wait(lock, [this] { return stopping_ || !to_do_.empty(); });
      if (to_do_.empty()) return;
      const Transfer transfer = to_do_.front();
      to_do_.pop_front();
      lock.unlock();
      const Completion completion{transfer.tag, move(transfer)};
      lock.lock();
      ended_.push_back(completion);
      ended_changed_.notify_one();
    }
  }

  int64_t move(const Transfer& transfer) const {
    const auto bytes = static_cast<size_t>(transfer.bytes);
    const ssize_t moved = transfer.direction == Direction::kRead
                              ? ::pread(descriptor_, transfer.data, bytes, transfer.offset)
                              : ::pwrite(descriptor_, transfer.data, bytes, transfer.offset);
    return moved < 0 ? -errno : moved;
  }

  const int descriptor_;
  const int depth_;
  const std::string reason_;
  std::vector<std::thread> threads_;

  std::mutex mutex_;
  std::condition_variable to_do_changed_;
  std::condition_variable ended_changed_;
  // Guarded by mutex_.
  std::deque<Transfer> to_do_;
  std::deque<Completion> ended_;
  bool stopping_ = false;
};

}  // namespace

std::unique_ptr<BlockDevice> make_thread_device(int descriptor, int depth, std::string reason) {
  return std::make_unique<ThreadDevice>(descriptor, depth, std::move(reason));
}

}  // namespace zeropage::offload::detail
