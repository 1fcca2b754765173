#include "comm/watch/status_store.h"

#include <condition_variable>
#include <mutex>
#include <thread>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace zeropage::comm::detail::status_store_test {
namespace {

using std::chrono::milliseconds;

// A store whose host can be stopped: what asks waits until it goes on.
class StoppableStore : public c10d::HashStore {
 public:
  void stop() { set_stopped(true); }
  void go_on() { set_stopped(false); }
  int waiting() {
    const std::lock_guard lock(mutex_);
    return waiting_;
  }

  void set(const std::string& key, const std::vector<uint8_t>& data) override {
    answer();
    HashStore::set(key, data);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    answer();
    return HashStore::get(key);
  }
  bool check(const std::vector<std::string>& keys) override {
    answer();
    return HashStore::check(keys);
  }

 private:
  void set_stopped(bool is_stopped) {
    const std::lock_guard lock(mutex_);
    is_stopped_ = is_stopped;
    changed_.notify_all();
  }
  void answer() {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.wait(lock, [&] { return !is_stopped_; });
    --waiting_;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_stopped_ = false;
  int waiting_ = 0;
};

TEST(StatusStoreTest, LeavesOneQuestionBehindHoweverLongNobodyAnswers) {
  const auto store = c10::make_intrusive<StoppableStore>();
  // The least that a question waits: a fifth of a second.
  StatusStore ours(store, 0, 2, milliseconds(800));
  const StatusStore theirs(store, 1, 2, milliseconds(800));
  store->stop();
  for (int look = 0; look < 3; ++look) {
    EXPECT_FALSE(ours.exchange({}));
    EXPECT_FALSE(ours.read({1}));
    EXPECT_EQ(ours.find(1), "");
    EXPECT_EQ(store->waiting(), 1);
  }
  store->go_on();
  const auto texts = ours.exchange({});
  ASSERT_TRUE(texts);
  EXPECT_EQ(texts->size(), 2U);
  EXPECT_EQ(ours.find(0), texts->front());
}

}  // namespace
}  // namespace zeropage::comm::detail::status_store_test
