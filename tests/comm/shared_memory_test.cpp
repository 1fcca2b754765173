// Whether a world gets shared memory, and what ranks say when they cannot have it.
#include <csignal>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/shared_memory/host_link.h"
#include "tests/harness/ranks.h"
#include "zeropage/check.h"
#include "zeropage/ledger.h"

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

TEST(SharedMemoryTest, TriesTheVeryMemoryThatTensorsWillBeIn) {
  const auto page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* const page =
      mmap(nullptr, page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(page, MAP_FAILED);
  const size_t bytes = detail::HostLink::segment_bytes(2);
  auto segment = detail::SharedSegment::create(bytes);
  auto again = detail::SharedSegment::open(segment.ticket(), bytes);
  const auto options = [](int own, uint64_t* sample) {
    return detail::HostLink::Options{.peers = {.ranks = {0, 1}, .own = own, .sample = sample},
                                     .deadline = std::chrono::seconds(30)};
  };
  detail::HostLink first(std::move(segment), options(0, static_cast<uint64_t*>(page)));
  detail::HostLink second(std::move(again), options(1, nullptr));
  EXPECT_EQ(first.peers().find(), "");
  EXPECT_EQ(second.peers().find(), "");
  // Like memory that only a driver maps.
  ASSERT_EQ(mprotect(page, page_bytes, PROT_NONE), 0);
  EXPECT_EQ(first.peers().find(), "");
  EXPECT_THAT(second.peers().find(), AllOf(HasSubstr("rank 1 cannot read the memory of rank 0"),
                                           HasSubstr("Bad address")));
  ASSERT_EQ(mprotect(page, page_bytes, PROT_READ | PROT_WRITE), 0);
  *static_cast<uint64_t*>(page) = 0;
  EXPECT_THAT(second.peers().find(), HasSubstr("it reads other values"));
  munmap(page, page_bytes);
}

std::string refusal_of(const std::string& ticket, size_t bytes) {
  try {
    detail::SharedSegment::open(ticket, bytes);
  } catch (const std::exception& error) {
    return memory::message_of(error);
  }
  return "";
}

TEST(SharedMemoryTest, OpensNothingButAMemfdOfThisUserWithTheExpectedSize) {
  constexpr size_t kBytes = 8192;
  const auto segment = detail::SharedSegment::create(kBytes);
  EXPECT_EQ(refusal_of(segment.ticket(), kBytes), "");
  EXPECT_THAT(refusal_of(segment.ticket(), 2 * kBytes),
              AllOf(HasSubstr("expected 16384 bytes, got 8192"), HasSubstr("SECURITY.md")));
  EXPECT_THAT(refusal_of("/etc/passwd 8192", kBytes), HasSubstr("is unreadable"));
  EXPECT_THAT(refusal_of(segment.ticket() + " /etc/passwd", kBytes), HasSubstr("is unreadable"));
  const auto ticket_of = [](int fd) { return c10::str(getpid(), " ", fd); };

  std::string path = ::testing::TempDir() + "zeropage_segment_XXXXXX";
  const int file = mkstemp(path.data());
  ASSERT_EQ(ftruncate(file, kBytes), 0);
  EXPECT_THAT(refusal_of(ticket_of(file), kBytes), HasSubstr("expected memory without a name"));
  unlink(path.c_str());
  EXPECT_THAT(refusal_of(ticket_of(file), kBytes), HasSubstr("is not a shared segment"));
  close(file);

  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  EXPECT_THAT(refusal_of(ticket_of(ends[0]), kBytes), HasSubstr("expected memory without a name"));
  close(ends[0]);
  close(ends[1]);

  const int unsealed = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  ASSERT_EQ(ftruncate(unsealed, kBytes), 0);
  EXPECT_THAT(refusal_of(ticket_of(unsealed), kBytes), HasSubstr("a memfd of sealed size"));
  close(unsealed);
}

TEST(SharedMemoryTest, LetsSiblingsReadForAsLongAsItIsUsed) {
  run_ranks(2, [](World&) { EXPECT_EQ(detail::SiblingsMayRead::count(), 2); },
            {.transport = Transport::kShared});
  EXPECT_EQ(detail::SiblingsMayRead::count(), 0);
}

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
