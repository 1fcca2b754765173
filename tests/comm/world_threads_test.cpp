#include <atomic>
#include <set>
#include <stdexcept>

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/errors.h"
#include "zeropage/ledger.h"
#include "zeropage/world.h"

namespace zeropage::comm::world_threads_test {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

// The message that an error which ends a test's ranks has for one of them.
std::string message_at(const RanksFailed& failed, size_t rank) {
  return error_of([&] {
    if (failed.errors()[rank]) std::rethrow_exception(failed.errors()[rank]);
  });
}

TEST(WorldThreadsTest, EachRankHasAWorldALedgerAndItsThreads) {
  for (const int ranks : {1, 3}) {
    std::atomic<int> called = 0;
    std::vector<const memory::Ledger*> ledgers(static_cast<size_t>(ranks));
    World::threads(ranks,
                   [&](World& world) {
                     ++called;
                     EXPECT_EQ(world.size(), ranks);
                     EXPECT_EQ(world.local_rank(), world.rank());
                     EXPECT_EQ(world.local_size(), ranks);
                     EXPECT_EQ(at::get_num_threads(), 2);
                     EXPECT_EQ(world.sum(1), ranks);
                     ledgers[static_cast<size_t>(world.rank())] = memory::Ledger::current().get();
                     EXPECT_EQ(memory::Ledger::current()->owner(),
                               c10::str("rank ", world.rank(), "/", ranks));
                     world.communicator().barrier("all have a ledger").wait();
                   },
                   {}, {.threads_per_rank = 2});
    EXPECT_EQ(called, ranks);
    const std::set<const memory::Ledger*> distinct(ledgers.begin(), ledgers.end());
    EXPECT_EQ(distinct.size(), static_cast<size_t>(ranks)) << "a ledger each";
    EXPECT_FALSE(distinct.contains(memory::Ledger::process().get()));
  }
}

TEST(WorldThreadsTest, AnExceptionEndsTheOthersAndComesWithItsRank) {
  try {
    World::threads(3, [](World& world) {
      if (world.rank() == 1) throw std::runtime_error("no such file");
      world.communicator().barrier("the others").wait();
    });
    FAIL() << "expected RanksFailed";
  } catch (const RanksFailed& failed) {
    EXPECT_STREQ(failed.what(), "[rank 1/3] no such file");
    EXPECT_EQ(failed.rank(), 1);
    ASSERT_EQ(failed.errors().size(), 3U);
    for (const size_t other : {0, 2}) {
      EXPECT_THAT(message_at(failed, other), HasSubstr("lost rank 1"));
    }
    EXPECT_THROW(std::rethrow_exception(failed.errors()[1]), std::runtime_error);
  }
}

TEST(WorldThreadsTest, AnErrorOfThisLibraryNamesItsRankOnceAndHasNoStack) {
  try {
    World::threads(2, [](World& world) {
      if (world.rank() == 1) world.communicator().all_gather(at::Tensor(), "nothing").wait();
    });
    FAIL() << "expected RanksFailed";
  } catch (const RanksFailed& failed) {
    EXPECT_THAT(failed.what(), AllOf(StartsWith("[rank 1/2] all_gather of nothing: expected"),
                                     Not(HasSubstr("frame #"))));
    EXPECT_EQ(failed.errors().size(), 2U);
  }
}

TEST(WorldThreadsTest, WhatIsNoExceptionClassIsNamedToo) {
  EXPECT_EQ(error_of([] { World::threads(1, [](World&) { throw 7; }); }),
            "[rank 0/1] an exception that is no std::exception");
}

TEST(WorldThreadsTest, RanksWithOtherLabelsAreOnOtherHosts) {
  World::threads(3,
                 [](World& world) {
                   EXPECT_EQ(world.local_rank(), world.rank() == 2 ? 1 : 0);
                   EXPECT_EQ(world.local_size(), world.rank() == 1 ? 1 : 2);
                 },
                 {}, {.hosts = {"here", "there", "here"}});
}

TEST(WorldThreadsTest, RefusesOptionsThatFitNoRanks) {
  const auto nothing = [](World&) {};
  EXPECT_THAT(error_of([&] { World::threads(0, nothing); }), HasSubstr("expected 1 rank or more"));
  EXPECT_THAT(error_of([&] { World::threads(2, nothing, {}, {.hosts = {"one"}}); }),
              HasSubstr("expected ThreadsOptions::hosts of 2 ranks, got 1"));
  EXPECT_THAT(error_of([&] { World::threads(2, nothing, {}, {.threads_per_rank = 0}); }),
              HasSubstr("threads_per_rank of 1 or more, got 0"));
}

}  // namespace
}  // namespace zeropage::comm::world_threads_test
