// Whether a world gets shared memory, and what ranks say when they cannot have it.
#include <csignal>
#include <sys/resource.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/detail/host_link.h"
#include "tests/harness/ranks.h"

namespace zeropage::comm::shared_memory_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;
using testing::try_ranks;

std::string transport_between(int size, const testing::RankOptions& options) {
  std::string transport;
  run_ranks(
      size,
      [&](World& world) {
        if (world.rank() == 0) transport = world.communicator().transport();
        const auto tensor = torch::full({100'000}, world.rank(), torch::kFloat32);
        world.communicator().all_reduce(tensor, ReduceOp::kMax, "a test").wait();
        EXPECT_TRUE(tensor.eq(size - 1).all().item<bool>());
      },
      options);
  return transport;
}

// No file, and no segment either, may be longer than this while it lives.
class SegmentLimit {
 public:
  explicit SegmentLimit(rlim_t bytes) {
    getrlimit(RLIMIT_FSIZE, &before_);
    // The system also signals who crosses the limit.
    before_handler_ = std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~SegmentLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, before_handler_);
  }
  SegmentLimit(const SegmentLimit&) = delete;
  SegmentLimit& operator=(const SegmentLimit&) = delete;

 private:
  rlimit before_{};
  void (*before_handler_)(int) = nullptr;
};

TEST(SharedMemoryTest, IsWhatRanksOfOneHostGet) {
  EXPECT_EQ(transport_between(3, {}), "shared");
  EXPECT_EQ(transport_between(3, {.transport = Transport::kGloo}), "gloo");
}

TEST(SharedMemoryTest, IsNotForRanksOfDifferentHosts) {
  EXPECT_EQ(transport_between(2, {.hosts = {"here", "there"}}), "gloo");
  const auto errors =
      try_ranks(2, [](World&) {}, {.transport = Transport::kShared, .hosts = {"here", "there"}});
  for (const auto& error : errors) {
    EXPECT_THAT(message_of(error), HasSubstr("the ranks are on several hosts"));
  }
}

TEST(SharedMemoryTest, GivesWayToGlooWithOneWarningWhereThereIsNoRoom) {
  ::testing::internal::CaptureStderr();
  std::string transport;
  {
    const SegmentLimit limit(16 << 10);
    transport = transport_between(3, {});
  }
  const std::string warning = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(transport, "gloo");
  EXPECT_THAT(warning, AllOf(HasSubstr("zeropage: no shared memory between the ranks of a host"),
                             HasSubstr("File too large"), HasSubstr("Gloo over TCP")));
  EXPECT_EQ(std::count(warning.begin(), warning.end(), '\n'), 1) << warning;
}

TEST(SharedMemoryTest, IsRefusedInWordsWhereItWasAskedForAndThereIsNoRoom) {
  const SegmentLimit limit(16 << 10);
  const auto errors = try_ranks(2, [](World&) {}, {.transport = Transport::kShared});
  for (const auto& error : errors) {
    EXPECT_THAT(message_of(error), AllOf(HasSubstr("was asked for, but cannot be had: rank 0"),
                                         HasSubstr("of shared memory: File too large")));
  }
}

TEST(SharedMemoryTest, TakesMoreRanksThanCores) {
  EXPECT_EQ(transport_between(24, {.transport = Transport::kShared}), "shared");
}

TEST(SharedMemoryTest, IsCountedOnceAHost) {
  std::atomic<int64_t> staging{0};
  run_ranks(4, [&](World&) { staging += memory::Ledger::current()->now()[memory::Kind::kStaging]; },
            {.transport = Transport::kShared});
  const auto segment = static_cast<int64_t>(detail::HostLink::segment_bytes(4));
  EXPECT_LE(staging, segment);
  EXPECT_GT(staging, segment - 4);
}

}  // namespace
}  // namespace zeropage::comm::shared_memory_test
