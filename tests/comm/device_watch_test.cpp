#include "comm/devices/device_watch.h"

#include <atomic>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tests/harness/errors.h"
#include "tests/harness/fake_accelerator/fake_accelerator.h"

namespace zeropage::comm::detail::device_watch_test {
namespace {

using device::Event;
using device::Stream;
using std::chrono::milliseconds;
using testing::error_of;
using ::testing::HasSubstr;
using testing::HeldStream;

Call gather(uint64_t sequence) {
  return {.operation = Operation::kAllGather,
          .sequence = sequence,
          .bytes = 4096,
          .what = "page \"a\""};
}

class DeviceWatchTest : public ::testing::Test {
 protected:
  DeviceWatchTest() { testing::register_fake_accelerator(); }

  c10::Stream raw_stream() const {
    return c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1)
        .getStreamFromGlobalPool(testing::fake_device());
  }
  // A point that its HeldStream holds back.
  static Event end_of(c10::Stream stream) {
    const c10::StreamGuard guard(stream);
    return Stream::current(stream.device()).record();
  }
  // Options of rank 0 of two; the other never says in which call it is.
  DeviceWatch::Options options(milliseconds deadline) {
    auto watch =
        std::make_shared<Watch>(Watch::Options{.store = c10::make_intrusive<c10d::HashStore>(),
                                               .size = 2,
                                               .limits = {.deadline = deadline}});
    watch->start({});
    return {
        .watch = std::move(watch),
        .lost_ranks = [this] { return rank_2_is_lost_ ? std::vector<int>{2} : std::vector<int>(); },
        .abort = [this] { ++aborts_; }};
  }
  template <typename Condition>
  static bool comes_true(Condition condition) {
    for (int look = 0; look < 500; ++look) {
      if (condition()) return true;
      std::this_thread::sleep_for(milliseconds(10));
    }
    return false;
  }

  std::atomic<int> aborts_{0};
  std::atomic<bool> rank_2_is_lost_{false};
};

TEST_F(DeviceWatchTest, SaysNothingOfWhatEnds) {
  DeviceWatch watch(options(milliseconds(100)));
  for (uint64_t call = 0; call < 3; ++call) watch.add(gather(call), {}, {});
  std::this_thread::sleep_for(milliseconds(200));
  EXPECT_NO_THROW(watch.check());
  EXPECT_TRUE(watch.is_idle());
  EXPECT_EQ(aborts_, 0);
}

TEST_F(DeviceWatchTest, NamesTheOperationThatOutlastsItsDeadlineAndAbortsOnce) {
  const c10::Stream stream = raw_stream();
  const HeldStream held(stream);
  DeviceWatch watch(options(milliseconds(100)));
  watch.add(gather(6), {}, {});
  watch.add(gather(7), {}, end_of(stream));
  watch.add(gather(8), {}, end_of(stream));
  ASSERT_TRUE(comes_true([&] { return aborts_ > 0; }));
  EXPECT_THAT(
      error_of([&] { watch.check(); }),
      HasSubstr("all_gather #7 of page \"a\" (4.0 KiB): rank 1 did not answer within 0.1 s"));
  EXPECT_EQ(error_of([&] { watch.check(); }), error_of([&] { watch.check(); }));
  EXPECT_FALSE(watch.is_idle());
  std::this_thread::sleep_for(milliseconds(200));
  EXPECT_EQ(aborts_, 1);
}

TEST_F(DeviceWatchTest, CountsTheTimeFromTheOperationsBeginOnTheDevice) {
  const c10::Stream compute = raw_stream();
  const c10::Stream stream = raw_stream();
  auto busy = std::make_unique<HeldStream>(compute);
  const HeldStream held(stream);
  DeviceWatch watch(options(milliseconds(200)));
  watch.add(gather(0), end_of(compute), end_of(stream));
  std::this_thread::sleep_for(milliseconds(400));
  EXPECT_NO_THROW(watch.check());
  busy.reset();
  EXPECT_TRUE(comes_true([&] { return aborts_ > 0; }));
}

TEST_F(DeviceWatchTest, NamesALostRankLongBeforeTheDeadline) {
  const c10::Stream stream = raw_stream();
  const HeldStream held(stream);
  DeviceWatch watch(options(std::chrono::seconds(600)));
  watch.add(gather(0), {}, end_of(stream));
  rank_2_is_lost_ = true;
  ASSERT_TRUE(comes_true([&] { return aborts_ > 0; }));
  EXPECT_THAT(error_of([&] { watch.check(); }),
              HasSubstr("all_gather #0 of page \"a\" (4.0 KiB): lost rank 2; it has ended"));
}

TEST_F(DeviceWatchTest, LetsAnOperationEndThatNeedsNothingMoreOfALostRank) {
  const c10::Stream stream = raw_stream();
  auto held = std::make_unique<HeldStream>(stream);
  DeviceWatch watch(options(std::chrono::seconds(600)));
  watch.add(gather(0), {}, end_of(stream));
  rank_2_is_lost_ = true;
  std::this_thread::sleep_for(milliseconds(200));
  held.reset();
  EXPECT_TRUE(comes_true([&] { return watch.is_idle(); }));
  std::this_thread::sleep_for(DeviceWait::kAfterLoss + milliseconds(200));
  EXPECT_NO_THROW(watch.check());
}

}  // namespace
}  // namespace zeropage::comm::detail::device_watch_test
