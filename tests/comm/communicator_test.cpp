#include "zeropage/communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tests/harness/contributions.h"
#include "tests/harness/ranks.h"
#include "tests/harness/slots.h"
#include "zeropage/simulation.h"

namespace zeropage::comm::communicator_test {
namespace {

using ::testing::AllOf;
using testing::contribution;
using testing::run_ranks;
using testing::tree_sum;
using testing::try_ranks;

enum class Way : uint8_t {
  kGloo,
  kShared,
  kSlots,
  kHalves,
  kThreeAndOnes,
  kRoundRobin,
  kRoundRobinSlots
};

// The host of each rank; none for ways of one level.
std::vector<int> hosts_of(Way way, int size) {
  std::vector<int> hosts;
  for (int rank = 0; rank < size && way >= Way::kHalves; ++rank) {
    if (way == Way::kHalves) {
      hosts.push_back(2 * rank / size);
    } else if (way == Way::kThreeAndOnes) {
      hosts.push_back(std::max(0, rank - 2));
    } else {
      hosts.push_back(rank % 2);
    }
  }
  return hosts;
}

class CommunicatorTest : public ::testing::TestWithParam<std::tuple<Way, int>> {
 protected:
  Way way() const { return std::get<0>(GetParam()); }
  int size() const { return std::get<1>(GetParam()); }
  bool has_two_levels() const {
    const std::vector<int> hosts = hosts_of(way(), size());
    const Topology topology(hosts.empty() ? std::vector<int>(1) : hosts);
    return topology.hosts() > 1 && topology.hosts() < topology.size();
  }

  void run(const testing::RankFunction& fn) const {
    testing::RankOptions options;
    const std::vector<int> hosts = hosts_of(way(), size());
    options.hosts = testing::host_labels(hosts);
    options.transport = way() == Way::kGloo ? Transport::kGloo
                        : hosts.empty()     ? Transport::kShared
                                            : Transport::kAuto;
    if (way() == Way::kSlots && size() > 1) options.decorate = testing::without_peer_memory;
    if (way() == Way::kRoundRobinSlots && has_two_levels()) {
      options.decorate = [hosts, store = c10::make_intrusive<c10d::HashStore>()](auto inner) {
        return testing::two_levels_without_peer_memory(std::move(inner), Topology(hosts), store);
      };
    }
    run_ranks(
        size(),
        [&](World& world) {
          const auto transport = world.communicator().transport();
          EXPECT_EQ(transport == "two-level", has_two_levels()) << transport;
          fn(world);
        },
        options);
  }
};

// From one element to several segments, ragged.
const std::vector<int64_t> kNumels = {0, 1, 5, 1000, 100'003, 700'001};

TEST_P(CommunicatorTest, AllReduceGivesEveryRankTheTreeSum) {
  run([&](World& world) {
    for (const int64_t numel : kNumels) {
      const auto tensor = contribution(world.rank(), numel);
      world.communicator().all_reduce(tensor, ReduceOp::kSum, "a test").wait();
      EXPECT_TRUE(torch::equal(tensor, tree_sum(0, size(), numel))) << numel;
    }
  });
}

TEST_P(CommunicatorTest, ReductionsOfLowPrecisionRoundOnce) {
  run([&](World& world) {
    for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
      for (const int64_t slice : {1, 257, 300'001}) {
        const int64_t numel = slice * size();
        const auto sum = tree_sum(0, size(), numel, dtype);
        const auto reduced = contribution(world.rank(), numel, dtype);
        world.communicator().all_reduce(reduced, ReduceOp::kMean, "a test").wait();
        EXPECT_TRUE(torch::equal(reduced, (sum / size()).to(dtype))) << dtype << slice;
        const auto whole = contribution(world.rank(), numel, dtype);
        world.communicator().reduce_scatter(whole, ReduceOp::kSum, "a test").wait();
        EXPECT_TRUE(torch::equal(whole.narrow(0, world.rank() * slice, slice),
                                 sum.narrow(0, world.rank() * slice, slice).to(dtype)))
            << dtype << slice;
      }
    }
  });
}

TEST_P(CommunicatorTest, ReduceScatterGivesARankTheMeanOfItsSliceAndLeavesTheRest) {
  run([&](World& world) {
    for (const int64_t slice : {1, 257, 300'001}) {
      const int64_t numel = slice * size();
      const auto whole = contribution(world.rank(), numel);
      world.communicator().reduce_scatter(whole, ReduceOp::kMean, "a test").wait();
      auto expected = contribution(world.rank(), numel);
      expected.narrow(0, world.rank() * slice, slice)
          .copy_((tree_sum(0, size(), numel) / size()).narrow(0, world.rank() * slice, slice));
      EXPECT_TRUE(torch::equal(whole, expected)) << slice;
    }
  });
}

TEST_P(CommunicatorTest, AllGatherBringsEverySliceIntoPlace) {
  run([&](World& world) {
    for (const auto& [dtype, slice] : {std::pair<torch::ScalarType, int64_t>{torch::kFloat32, 4097},
                                       {torch::kBFloat16, 4097},
                                       {torch::kInt64, 300'001}}) {
      const auto whole = torch::zeros({slice * size()}, dtype);
      whole.narrow(0, world.rank() * slice, slice).fill_(world.rank() + 1);
      world.communicator().all_gather(whole, "a test").wait();
      for (int rank = 0; rank < size(); ++rank) {
        EXPECT_TRUE(whole.narrow(0, rank * slice, slice).eq(rank + 1).all().item<bool>());
      }
    }
  });
}

TEST_P(CommunicatorTest, BroadcastReachesAllFromAnyRoot) {
  run([&](World& world) {
    for (int root = 0; root < size(); ++root) {
      for (const int64_t numel : {12'345, 234'567}) {
        const auto tensor = contribution(world.rank(), numel);
        world.communicator().broadcast(tensor, root, "a test").wait();
        EXPECT_TRUE(torch::equal(tensor, contribution(root, numel))) << root;
      }
    }
  });
}

TEST_P(CommunicatorTest, ReduceGivesTheRootTheTreeSumAndLeavesTheOthers) {
  run([&](World& world) {
    for (const int root : {size() - 1, size() / 2}) {
      for (const int64_t numel : {0, 5, 8192, 100'003, 700'001}) {
        const auto sum = contribution(world.rank(), numel);
        world.communicator().reduce(sum, ReduceOp::kSum, root, "a test").wait();
        const bool is_root = world.rank() == root;
        const auto expected =
            is_root ? tree_sum(0, size(), numel) : contribution(world.rank(), numel);
        EXPECT_TRUE(torch::equal(sum, expected)) << numel << " at " << root;
      }
      const auto mean = contribution(world.rank(), 20'001, torch::kBFloat16);
      world.communicator().reduce(mean, ReduceOp::kMean, root, "a test").wait();
      const auto expected = tree_sum(0, size(), 20'001, torch::kBFloat16) / size();
      EXPECT_EQ(torch::equal(mean, expected.to(torch::kBFloat16)),
                world.rank() == root || size() == 1);
    }
  });
}

// Short ones, and long ones that are read straight from the owner.
TEST_P(CommunicatorTest, GatherBringsSlicesToTheRootAndScatterTakesThemBack) {
  run([&](World& world) {
    for (const int root : {0, size() - 1}) {
      for (const int64_t slice : {0, 1, 4097, 70'001}) {
        const bool is_root = world.rank() == root;
        const auto own = contribution(world.rank(), slice);
        const auto whole = torch::zeros({slice * size()});
        whole.narrow(0, root * slice, slice).copy_(own);
        world.communicator().gather(is_root ? whole : own, root, "a test").wait();
        for (int rank = 0; rank < size() && is_root; ++rank) {
          EXPECT_TRUE(
              torch::equal(whole.narrow(0, rank * slice, slice), contribution(rank, slice)));
        }
        EXPECT_TRUE(torch::equal(own, contribution(world.rank(), slice)));
        const auto taken = torch::zeros({slice});
        world.communicator().scatter(is_root ? whole : taken, root, "a test").wait();
        const auto& kept = is_root ? whole.narrow(0, root * slice, slice) : taken;
        EXPECT_TRUE(torch::equal(kept, own)) << slice << " from " << root;
      }
    }
  });
}

TEST_P(CommunicatorTest, AllToAllExchangesSlices) {
  run([&](World& world) {
    for (const int64_t slice : {0, 1, 4097, 70'001}) {
      const auto given = contribution(world.rank(), slice * size(), torch::kBFloat16);
      const auto received = torch::zeros_like(given);
      world.communicator().all_to_all(given, received, "a test").wait();
      for (int rank = 0; rank < size(); ++rank) {
        const auto theirs = contribution(rank, slice * size(), torch::kBFloat16);
        EXPECT_TRUE(torch::equal(received.narrow(0, rank * slice, slice),
                                 theirs.narrow(0, world.rank() * slice, slice)))
            << slice << " of " << rank;
      }
      EXPECT_TRUE(
          torch::equal(given, contribution(world.rank(), slice * size(), torch::kBFloat16)));
    }
  });
}

TEST_P(CommunicatorTest, BarrierWaitsForTheLastRank) {
  std::atomic<int> arrived{0};
  run([&](World& world) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20 * world.rank()));
    ++arrived;
    world.communicator().barrier("a test").wait();
    EXPECT_EQ(arrived, size());
  });
}

TEST_P(CommunicatorTest, SendsMatchReceivesInOrder) {
  run([&](World& world) {
    if (size() == 1) return;
    const int next = (world.rank() + 1) % size();
    const int previous = (world.rank() + size() - 1) % size();
    const auto first = torch::full({10}, world.rank(), torch::kFloat32);
    const auto received = torch::zeros({10});
    // Operations run in the order of the calls, so a ring needs one rank to receive first.
    for (int round = 0; round < 3; ++round) {
      if (world.rank() == 0) {
        world.communicator().send(first, next, "a test").wait();
        world.communicator().recv(received, previous, "a test").wait();
      } else {
        world.communicator().recv(received, previous, "a test").wait();
        world.communicator().send(first, next, "a test").wait();
      }
      EXPECT_TRUE(received.eq(previous).all().item<bool>());
    }
  });
}

TEST_P(CommunicatorTest, SendsLongTensorsWhole) {
  run([&](World& world) {
    if (size() == 1) return;
    const auto tensor = contribution(world.rank(), 300'001);
    if (world.rank() == 0) world.communicator().send(tensor, size() - 1, "a test").wait();
    if (world.rank() == size() - 1) {
      world.communicator().recv(tensor, 0, "a test").wait();
      EXPECT_TRUE(torch::equal(tensor, contribution(0, 300'001)));
    }
  });
}

TEST_P(CommunicatorTest, ManyOperationsInFlightEndInOrder) {
  run([&](World& world) {
    std::vector<torch::Tensor> tensors;
    std::vector<Pending> pending;
    for (int round = 0; round < 40; ++round) {
      tensors.push_back(torch::full({1 + 977 * round}, world.rank() + round, torch::kFloat64));
      pending.push_back(world.communicator().all_reduce(tensors.back(), ReduceOp::kMax, "a test"));
    }
    for (int round = 0; round < 40; ++round) {
      pending[round].wait();
      EXPECT_TRUE(tensors[round].eq(size() - 1 + round).all().item<bool>());
    }
  });
}

TEST_P(CommunicatorTest, RefusesTensorsThatItCannotMoveInPlace) {
  run([&](World& world) {
    Communicator& communicator = world.communicator();
    EXPECT_THROW(communicator.all_reduce(torch::zeros({2, 2}), ReduceOp::kSum, "a test"),
                 c10::Error);
    EXPECT_THROW(
        communicator.all_reduce(torch::zeros({8}).slice(0, 0, 8, 2), ReduceOp::kSum, "a test"),
        c10::Error);
    EXPECT_THROW(communicator.broadcast(torch::zeros({1}), size(), "a test"), c10::Error);
    EXPECT_THROW(communicator.send(torch::zeros({1}), world.rank(), "a test"), c10::Error);
    const auto whole = torch::zeros({2 * size()});
    EXPECT_THROW(communicator.reduce(whole, ReduceOp::kSum, -1, "a test"), c10::Error);
    EXPECT_THROW(communicator.gather(whole, size(), "a test"), c10::Error);
    EXPECT_THROW(communicator.all_to_all(whole, whole, "a test"), c10::Error);
    EXPECT_THROW(communicator.all_to_all(whole, whole.to(torch::kDouble), "a test"), c10::Error);
    EXPECT_THROW(communicator.all_to_all(whole, torch::zeros({size()}), "a test"), c10::Error);
    if (size() > 1) {
      EXPECT_THROW(communicator.scatter(torch::zeros({size() + 1}), world.rank(), "a test"),
                   c10::Error);
      EXPECT_THROW(communicator.all_gather(torch::zeros({size() + 1}), "a test"), c10::Error);
    }
  });
}

// Communicators of one level; traffic_test.cpp has all.
class OneLevelTest : public CommunicatorTest {};

TEST_P(OneLevelTest, CountsTheBytesItSends) {
  run([&](World& world) {
    const int64_t slice = 100'000;
    const auto whole = torch::zeros({slice * size()});
    Communicator& communicator = world.communicator();
    communicator.all_gather(whole, "a test").wait();
    communicator.reduce_scatter(whole, ReduceOp::kSum, "a test").wait();
    communicator.all_reduce(whole, ReduceOp::kSum, "a test").wait();
    const int64_t one_pass = 4 * slice * (size() - 1);
    EXPECT_EQ(communicator.wire_traffic().all_gather.bytes, one_pass);
    EXPECT_EQ(communicator.wire_traffic().reduce_scatter.bytes, one_pass);
    EXPECT_EQ(communicator.wire_traffic().all_reduce.bytes, 2 * one_pass);
  });
}

std::string case_name(const ::testing::TestParamInfo<std::tuple<Way, int>>& info) {
  constexpr const char* kNames[] = {"Gloo",         "Shared",     "Slots",          "Halves",
                                    "ThreeAndOnes", "RoundRobin", "RoundRobinSlots"};
  return c10::str(kNames[static_cast<size_t>(std::get<0>(info.param))], std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(WaysAndRanks, OneLevelTest,
                         ::testing::Combine(::testing::Values(Way::kGloo, Way::kShared,
                                                              Way::kSlots),
                                            ::testing::Values(1, 2, 3, 4, 7, 8)),
                         case_name);

INSTANTIATE_TEST_SUITE_P(WaysAndRanks, CommunicatorTest,
                         ::testing::Combine(::testing::Values(Way::kGloo, Way::kShared, Way::kSlots,
                                                              Way::kHalves, Way::kThreeAndOnes,
                                                              Way::kRoundRobin,
                                                              Way::kRoundRobinSlots),
                                            ::testing::Values(1, 2, 3, 4, 7, 8)),
                         case_name);

TEST(CommunicatorFailureTest, ARankThatLeavesIsNamedWithTheOperation) {
  const auto errors = try_ranks(3, [](World& world) {
    const auto tensor = torch::zeros({100'000});
    world.communicator().all_reduce(tensor, ReduceOp::kSum, "page \"blocks.0\"").wait();
    if (world.rank() == 1) throw std::runtime_error("rank 1 has had enough");
    world.communicator().all_reduce(tensor, ReduceOp::kSum, "page \"blocks.1\"").wait();
  });
  EXPECT_EQ(testing::message_of(errors[1]), "rank 1 has had enough");
  const std::string message = testing::message_of(errors[0]) + testing::message_of(errors[2]);
  EXPECT_THAT(message, ::testing::HasSubstr("lost rank 1"));
  EXPECT_THAT(message, ::testing::HasSubstr("all_reduce #1 of page \"blocks.1\""));
  EXPECT_THAT(testing::message_of(errors[0]), ::testing::StartsWith("[rank 0/3]"));
}

TEST(CommunicatorFailureTest, ARankThatStopsCallingIsNamedAtTheBusyLimit) {
  const auto start = std::chrono::steady_clock::now();
  std::atomic<bool> over{false};
  const auto errors = try_ranks(
      2,
      [&](World& world) {
        if (world.rank() == 1) {
          while (!over) std::this_thread::sleep_for(std::chrono::milliseconds(10));
          throw std::runtime_error("late");
        }
        try {
          world.communicator().barrier("the start").wait();
        } catch (...) {
          over = true;
          throw;
        }
      },
      {.deadline = std::chrono::milliseconds(500), .busy_limit = std::chrono::milliseconds(500)});
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
  EXPECT_THAT(testing::message_of(errors[0]),
              ::testing::HasSubstr(
                  "barrier #0 of the start (0 B): rank 1 was waited for in vain, for 0.5 s"));
}

TEST(CommunicatorFailureTest, RanksOutOfStepLearnWhatTheOtherWasIn) {
  const auto errors =
      try_ranks(2,
                [](World& world) {
                  const auto tensor = torch::zeros({64});
                  if (world.rank() == 0) {
                    world.communicator().all_reduce(tensor, ReduceOp::kSum, "page \"a\"").wait();
                  } else {
                    world.communicator().all_gather(tensor, "page \"b\"").wait();
                  }
                },
                {.deadline = std::chrono::milliseconds(500)});
  const std::string messages = testing::message_of(errors[0]) + testing::message_of(errors[1]);
  EXPECT_THAT(messages, ::testing::HasSubstr("all_reduce #0 of page \"a\""));
  EXPECT_THAT(messages, ::testing::HasSubstr("all_gather #0 of page \"b\""));
}

TEST(CommunicatorFailureTest, RanksAtDifferentPagesExchangeNothing) {
  const auto errors = try_ranks(2,
                                [](World& world) {
                                  const auto page = torch::full({64}, world.rank());
                                  const char* what =
                                      world.rank() == 0 ? "page \"a\"" : "page \"b\"";
                                  world.communicator().all_gather(page, what).wait();
                                },
                                {.deadline = std::chrono::milliseconds(500)});
  const std::string messages = testing::message_of(errors[0]) + testing::message_of(errors[1]);
  EXPECT_THAT(messages, ::testing::HasSubstr("all_gather #0 of page \"a\""));
  EXPECT_THAT(messages, ::testing::HasSubstr("all_gather #0 of page \"b\""));
}

// Whatever the others are in, and whether they share the host of the one that leaves.
TEST(CommunicatorFailureTest, ARankOfOneOfSeveralHostsIsNamedByAllInSeconds) {
  const std::vector<testing::RankFunction> calls = {
      [](World& world) { world.communicator().barrier("a test").wait(); },
      [](World& world) {
        world.communicator().all_reduce(torch::zeros({10}), ReduceOp::kSum, "a test").wait();
      },
      [](World& world) {
        world.communicator().all_reduce(torch::zeros({900'000}), ReduceOp::kSum, "a test").wait();
      },
      [](World& world) {
        world.communicator().reduce_scatter(torch::zeros({5'000}), ReduceOp::kSum, "a test").wait();
      },
      [](World& world) {
        world.communicator().all_gather(torch::zeros({900'000}), "a test").wait();
      }};
  for (size_t call = 0; call < calls.size(); ++call) {
    for (int victim = 0; victim < 5; ++victim) {
      std::atomic<int64_t> latest_ms = 0;
      const auto errors = try_ranks(5,
                                    [&](World& world) {
                                      world.communicator().barrier("the start").wait();
                                      if (world.rank() == victim) throw std::runtime_error("gone");
                                      const auto start = std::chrono::steady_clock::now();
                                      try {
                                        calls[call](world);
                                      } catch (...) {
                                        const auto took =
                                            std::chrono::duration_cast<std::chrono::milliseconds>(
                                                std::chrono::steady_clock::now() - start);
                                        latest_ms = std::max<int64_t>(latest_ms, took.count());
                                        throw;
                                      }
                                    },
                                    {.hosts = testing::host_labels({0, 1, 0, 1, 1})});
      EXPECT_LT(latest_ms, 2000) << "call " << call << " without rank " << victim;
      for (int rank = 0; rank < 5; ++rank) {
        if (rank == victim) continue;
        EXPECT_THAT(testing::message_of(errors[rank]),
                    AllOf(::testing::HasSubstr(c10::str("lost rank ", victim)),
                          ::testing::HasSubstr("#"), ::testing::HasSubstr("of a test (")))
            << "call " << call << " without rank " << victim;
      }
    }
  }
}

TEST(CommunicatorFailureTest, ARankThatWaitsForItsNeighbourHearsOfALostRankElsewhere) {
  using Clock = std::chrono::steady_clock;
  std::atomic<bool> over{false};
  const auto errors = try_ranks(
      3,
      [&](World& world) {
        world.communicator().barrier("the start").wait();
        if (world.rank() == 2) throw std::runtime_error("gone");
        const auto start = Clock::now();
        while (world.rank() == 1 && !over && Clock::now() < start + std::chrono::seconds(10)) {
          std::this_thread::sleep_for(std::chrono::milliseconds(10));
        }
        try {
          world.communicator().barrier("a test").wait();
        } catch (...) {
          over = true;
          EXPECT_LT(Clock::now() - start, std::chrono::seconds(4)) << world.rank();
          throw;
        }
      },
      {.hosts = testing::host_labels({0, 0, 1})});
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_THAT(
        testing::message_of(errors[rank]),
        AllOf(::testing::HasSubstr("barrier #1 of a test"), ::testing::HasSubstr("lost rank 2")));
  }
}

TEST(CommunicatorFailureTest, ABrokenCommunicatorRefusesWhatFollows) {
  const auto errors = try_ranks(2, [](World& world) {
    if (world.rank() == 1) throw std::runtime_error("gone");
    const auto tensor = torch::zeros({1});
    EXPECT_THROW(world.communicator().all_reduce(tensor, ReduceOp::kSum, "first").wait(),
                 c10::Error);
    world.communicator().all_reduce(tensor, ReduceOp::kSum, "second").wait();
  });
  EXPECT_THAT(testing::message_of(errors[0]), ::testing::HasSubstr("of first"));
}

}  // namespace
}  // namespace zeropage::comm::communicator_test
