#include "comm/watch/watch.h"

#include <atomic>
#include <thread>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace zeropage::comm::detail::watch_test {
namespace {

using std::chrono::milliseconds;

Call barrier(uint64_t sequence) {
  return {.operation = Operation::kBarrier, .sequence = sequence, .what = "the end"};
}

// Rank 0 of two, whose connection to rank 1 is broken unless a test says otherwise. No deadline ends
// anything here.
class WatchTest : public ::testing::Test {
 protected:
  Watch::Options of_rank(int rank) const {
    return {
        .store = store_, .rank = rank, .size = 2, .limits = {.deadline = std::chrono::seconds(60)}};
  }
  WatchTest() : ours_(of_rank(0)), theirs_(std::make_unique<Watch>(of_rank(1))) {
    ours_.start({.interrupt = [this] { is_interrupted_ = true; },
                 .lost_ranks =
                     [this] { return is_connected_ ? std::vector<int>() : std::vector<int>{1}; }});
    theirs_->start({});
  }
  ~WatchTest() override { ours_.stop(); }

  // Whether the operation is ended before it has lasted that long.
  bool is_ended(const Call& call, milliseconds within) {
    ours_.activity().perform(call, [&] {
      const auto end = std::chrono::steady_clock::now() + within;
      while (!is_interrupted_ && std::chrono::steady_clock::now() < end) {
        std::this_thread::sleep_for(milliseconds(1));
      }
    });
    return is_interrupted_;
  }

  const c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
  std::atomic<bool> is_interrupted_{false};
  std::atomic<bool> is_connected_{false};
  Watch ours_;
  std::unique_ptr<Watch> theirs_;
};

TEST_F(WatchTest, ARankThatEndsAfterAnOperationIsNotMissedByThoseThatAreStillInIt) {
  theirs_->activity().perform(barrier(0), [] {});
  theirs_.reset();
  EXPECT_FALSE(is_ended(barrier(0), milliseconds(600)));
  EXPECT_TRUE(is_ended(barrier(1), milliseconds(5000))) << "which rank 1 never began";
  const auto verdict = ours_.activity().verdict();
  ASSERT_TRUE(verdict);
  EXPECT_EQ(verdict->kind, Verdict::Kind::kLost);
  EXPECT_EQ(verdict->other, 1);
}

TEST_F(WatchTest, ARankThatEndsAfterAnOperationInWhichItWasHeardIsNotOutOfStep) {
  is_connected_ = true;
  std::thread ends_first([this] {
    theirs_->activity().perform(barrier(0),
                                [] { std::this_thread::sleep_for(milliseconds(1500)); });
    theirs_.reset();
    is_connected_ = false;
  });
  EXPECT_FALSE(is_ended(barrier(0), milliseconds(3500)));
  ends_first.join();
}

TEST_F(WatchTest, ARankThatEndsBeforeAnOperationIsMissed) {
  theirs_.reset();
  EXPECT_TRUE(is_ended(barrier(0), milliseconds(5000)));
}

TEST_F(WatchTest, ARankWhoseOperationFailedIsMissed) {
  const auto fails = [] { throw std::runtime_error("a full disk"); };
  EXPECT_THROW(theirs_->activity().perform(barrier(0), fails), std::runtime_error);
  theirs_.reset();
  EXPECT_TRUE(is_ended(barrier(0), milliseconds(5000)));
}

TEST_F(WatchTest, ARankThatIsKilledIsMissedAtOnce) {
  EXPECT_TRUE(is_ended(barrier(0), milliseconds(5000))) << "rank 1's watch says nothing of an end";
}

}  // namespace
}  // namespace zeropage::comm::detail::watch_test
