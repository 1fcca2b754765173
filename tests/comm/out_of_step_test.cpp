// Ranks that wait for each other in vain, and ranks that merely wait.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/watch/rank_status.h"
#include "tests/harness/ranks.h"

namespace zeropage::comm::out_of_step_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;
using testing::try_ranks;
using namespace std::chrono_literals;

// With such a deadline ranks begin to ask where the others are after a quarter of a second.
constexpr auto kQuickDeadline = 1s;
constexpr auto kLongerThanPatience = 600ms;

class OutOfStepTest : public ::testing::TestWithParam<Transport> {
 protected:
  testing::RankOptions options() const { return {.transport = GetParam()}; }
  testing::RankOptions quick() const {
    return {.deadline = kQuickDeadline, .transport = GetParam()};
  }
  std::vector<std::string> errors_of(int size, const testing::RankFunction& calls) const;
};

// What each rank says when all run `calls`; the deadline is far beyond what the test may take.
std::vector<std::string> OutOfStepTest::errors_of(int size,
                                                  const testing::RankFunction& calls) const {
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::string> messages;
  for (const auto& error : try_ranks(size, calls, options())) messages.push_back(message_of(error));
  EXPECT_LT(std::chrono::steady_clock::now() - start, 4s) << "found out within 2 s";
  return messages;
}

TEST_P(OutOfStepTest, DifferentOperationsAreNamedOnBothRanks) {
  const auto errors = errors_of(2, [](World& world) {
    const auto tensor = torch::zeros({64});
    world.communicator().barrier("the start").wait();
    if (world.rank() == 0) {
      world.communicator().all_reduce(tensor, ReduceOp::kSum, "page \"a\"").wait();
    } else {
      world.communicator().all_gather(tensor, "page \"b\"").wait();
    }
  });
  const std::string ours = "all_reduce #1 of page \"a\" (256 B)";
  const std::string theirs = "all_gather #1 of page \"b\" (256 B)";
  EXPECT_THAT(errors[0], AllOf(HasSubstr("[rank 0/2] " + ours + ": rank 1 is out of step"),
                               HasSubstr(theirs)));
  EXPECT_THAT(errors[1], AllOf(HasSubstr("[rank 1/2] " + theirs + ": rank 0 is out of step"),
                               HasSubstr(ours)));
}

TEST_P(OutOfStepTest, OperationsWithARootAreNamedOnBothRanks) {
  const auto errors = errors_of(2, [](World& world) {
    const auto whole = torch::zeros({64});
    world.communicator().barrier("the start").wait();
    // Each is the root of its own, so both wait.
    if (world.rank() == 0) {
      world.communicator().gather(whole, 0, "a loss").wait();
    } else {
      world.communicator().scatter(whole, 1, "a batch").wait();
      world.communicator().all_to_all(whole, whole.clone(), "tokens").wait();
    }
  });
  const std::string ours = "gather #1 of a loss (256 B)";
  EXPECT_THAT(errors[0], HasSubstr("[rank 0/2] " + ours + ": rank 1 is out of step"));
  EXPECT_THAT(errors[1], HasSubstr("rank 0 is out of step: it waits in " + ours));
}

TEST_P(OutOfStepTest, DifferentSizesThatPrintAlikeAreToldInBytes) {
  const auto errors = errors_of(2, [](World& world) {
    const auto tensor = torch::zeros({1'000'000 + 2 * world.rank()});
    world.communicator().all_gather(tensor, "page \"a\"").wait();
  });
  EXPECT_THAT(errors[0], HasSubstr("of 4000008 bytes against 4000000"));
  EXPECT_THAT(errors[1], HasSubstr("of 4000000 bytes against 4000008"));
}

TEST_P(OutOfStepTest, DifferentPagesAreNamedOnBothRanks) {
  const auto errors = errors_of(2, [](World& world) {
    const std::string page = c10::str("page \"blocks.", world.rank(), "\"");
    world.communicator().broadcast(torch::zeros({64}), 0, page).wait();
  });
  for (const std::string& error : errors) {
    EXPECT_THAT(error, AllOf(HasSubstr("broadcast #0 of page \"blocks.0\""),
                             HasSubstr("broadcast #0 of page \"blocks.1\"")));
  }
}

TEST_P(OutOfStepTest, OneRankOfManyIsNamedOnAll) {
  const auto errors = errors_of(5, [](World& world) {
    const auto tensor = torch::zeros({100'000});
    if (world.rank() != 3) world.communicator().broadcast(tensor, 2, "page \"a\"").wait();
    world.communicator().all_reduce(tensor, ReduceOp::kSum, "page \"b\"").wait();
  });
  for (int rank = 0; rank < 5; ++rank) {
    EXPECT_THAT(errors[rank], AllOf(HasSubstr("broadcast #0 of page \"a\""),
                                    HasSubstr("all_reduce #0 of page \"b\"")))
        << rank;
  }
}

TEST_P(OutOfStepTest, TwoRanksThatBothSendAreNamed) {
  const auto errors = errors_of(2, [](World& world) {
    world.communicator().send(torch::zeros({64}), 1 - world.rank(), "a message").wait();
  });
  // Over shared memory the second to end may say what the first one said.
  for (const std::string& error : errors) {
    EXPECT_THAT(error, AllOf(HasSubstr("send #0 to rank 1 of a message"),
                             HasSubstr("send #0 to rank 0 of a message"),
                             HasSubstr("is out of step: it waits in send #0 to rank ")));
  }
}

TEST_P(OutOfStepTest, AReceiverWhosePeerIsInACollectiveIsNamedOnBothRanks) {
  const auto errors = errors_of(2, [](World& world) {
    if (world.rank() == 0) {
      world.communicator().recv(torch::zeros({64}), 1, "a message").wait();
    } else {
      world.communicator().barrier("the end of the step").wait();
    }
  });
  for (const std::string& error : errors) {
    EXPECT_THAT(error, AllOf(HasSubstr("barrier #0 of the end of the step"),
                             HasSubstr("recv #0 from rank 1 of a message"),
                             HasSubstr("is out of step: it waits in ")));
  }
}

TEST_P(OutOfStepTest, ASlowRankIsLeftAlone) {
  run_ranks(
      3,
      [](World& world) {
        const auto tensor = torch::full({100'000}, world.rank(), torch::kFloat32);
        for (int round = 0; round < 3; ++round) {
          if (world.rank() == round) std::this_thread::sleep_for(kLongerThanPatience);
          world.communicator().broadcast(tensor, (round + 1) % 3, "a page").wait();
          world.communicator().all_reduce(tensor, ReduceOp::kMax, "a page").wait();
          world.communicator().barrier("a round").wait();
        }
        EXPECT_TRUE(tensor.eq(1).all().item<bool>());
      },
      quick());
}

// A broadcast over TCP ends without the ranks that come late; in shared memory it waits for all.
TEST(OutOfStepOverGlooTest, SlowPairsBesideABroadcastAreLeftAlone) {
  const auto calls = [](World& world) {
    const auto tensor = torch::zeros({1000});
    Communicator& communicator = world.communicator();
    // Each rank waits in something else for longer than its patience, and all of it goes on.
    if (world.rank() == 0) {
      communicator.recv(tensor, 1, "a message").wait();
      communicator.broadcast(tensor, 2, "a page").wait();
    } else if (world.rank() == 1) {
      communicator.broadcast(tensor, 2, "a page").wait();
      communicator.send(tensor, 0, "a message").wait();
    } else {
      std::this_thread::sleep_for(kLongerThanPatience);
      communicator.broadcast(tensor, 2, "a page").wait();
    }
  };
  run_ranks(3, calls, {.deadline = kQuickDeadline, .transport = Transport::kGloo});
}

TEST(OutOfStepOverSharedMemoryTest, ABroadcastThatCannotEndNamesBothCalls) {
  const auto errors = try_ranks(2,
                                [](World& world) {
                                  const auto tensor = torch::zeros({1000});
                                  if (world.rank() == 0) {
                                    world.communicator().recv(tensor, 1, "a message").wait();
                                  } else {
                                    world.communicator().broadcast(tensor, 1, "a page").wait();
                                  }
                                },
                                {.transport = Transport::kShared});
  for (const auto& error : errors) {
    EXPECT_THAT(message_of(error),
                AllOf(HasSubstr("recv #0 from rank 1"), HasSubstr("broadcast #0 of a page")));
  }
}

TEST_P(OutOfStepTest, SlowPairsAreLeftAlone) {
  const auto calls = [](World& world) {
    const auto tensor = torch::zeros({1000});
    if (world.rank() == 0) {
      world.communicator().recv(tensor, 1, "a message").wait();
    } else if (world.rank() == 1) {
      std::this_thread::sleep_for(kLongerThanPatience);
      world.communicator().send(tensor, 0, "a message").wait();
    }
    world.communicator().barrier("the end").wait();
  };
  run_ranks(3, calls, quick());
}

// The store of one rank alone is slow.
class SlowStore final : public c10d::TCPStore {
 public:
  using TCPStore::TCPStore;
  int64_t add(const std::string& key, int64_t value) override {
    if (is_slow) std::this_thread::sleep_for(1500ms);
    return TCPStore::add(key, value);
  }
  std::atomic<bool> is_slow = false;
};

// Rank 1 is still with texts that have all come, while the others have gone on to what follows.
TEST_P(OutOfStepTest, ARankThatIsSlowToReadTextsIsLeftAlone) {
  c10d::TCPStoreOptions over_tcp;
  over_tcp.port = 0;
  over_tcp.isServer = true;
  over_tcp.waitWorkers = false;
  const auto server = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", over_tcp);
  over_tcp.isServer = false;
  over_tcp.port = server->getPort();
  std::vector<c10::intrusive_ptr<SlowStore>> stores;
  for (int rank = 0; rank < 3; ++rank) {
    stores.push_back(c10::make_intrusive<SlowStore>("127.0.0.1", over_tcp));
  }
  testing::RankOptions with_stores = options();
  with_stores.store = [&](int rank) { return stores[static_cast<size_t>(rank)]; };
  run_ranks(
      3,
      [&](World& world) {
        const auto tensor = torch::zeros({64});
        world.communicator().barrier("the start").wait();
        stores[1]->is_slow = true;
        for (int round = 0; round < 2; ++round) {
          EXPECT_EQ(world.gather_text("a report", std::to_string(world.rank())).back(), "2");
          world.communicator().all_reduce(tensor, ReduceOp::kSum, "page \"a\"").wait();
        }
      },
      with_stores);
}

TEST(NeverMeetTest, WhoHasGivenItsTextIsNotWaitedForByWhoReadsIt) {
  using detail::RankStatus;
  const detail::Call barrier{.operation = detail::Operation::kBarrier, .sequence = 4};
  RankStatus in_texts{.begun = 4, .texts = 7, .where = RankStatus::Where::kInTexts};
  RankStatus in_call{.begun = 5, .texts = 6, .call = barrier};
  EXPECT_TRUE(never_meet(0, in_texts, 1, in_call));
  EXPECT_TRUE(never_meet(1, in_call, 0, in_texts));
  in_call.texts = 7;
  EXPECT_FALSE(never_meet(0, in_texts, 1, in_call));
  EXPECT_FALSE(never_meet(1, in_call, 0, in_texts));
}

TEST(NeverMeetTest, WhoHasSentItsMessageIsNotWaitedForByWhoReceivesIt) {
  using detail::RankStatus;
  RankStatus receives{.begun = 4,
                      .call = {.operation = detail::Operation::kPair,
                               .sequence = 2,
                               .peer = 1,
                               .end = detail::Call::End::kReceives}};
  RankStatus in_call{.begun = 5,
                     .sent = {{0, 2}},
                     .call = {.operation = detail::Operation::kBarrier, .sequence = 4}};
  EXPECT_TRUE(never_meet(0, receives, 1, in_call));
  EXPECT_TRUE(never_meet(1, in_call, 0, receives));
  in_call.sent[0] = 3;
  EXPECT_FALSE(never_meet(0, receives, 1, in_call));
  EXPECT_FALSE(never_meet(1, in_call, 0, receives));
  receives.call.end = detail::Call::End::kSends;
  EXPECT_TRUE(never_meet(0, receives, 1, in_call));
}

TEST(StandingTest, IsReadAsItWasWritten) {
  detail::RankStatus status;
  status.heartbeat = 7;
  status.begun = 3;
  status.texts = 5;
  status.sent = {{0, 4}, {11, 1ULL << 40}};
  status.call = {.operation = detail::Operation::kPair,
                 .sequence = 12,
                 .bytes = 1LL << 40,
                 .what = "page \"a b\"\nof two lines",
                 .peer = 2,
                 .end = detail::Call::End::kReceives};
  status.where = detail::RankStatus::Where::kInTexts;
  status.since_ms = 1 << 20;
  status.words = "texts of \"a model\"";
  status.account = "all is lost";
  const auto read = detail::RankStatus::parse(status.to_text());
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->to_text(), status.to_text());
  EXPECT_EQ(read->call.describe(), status.call.describe());
  EXPECT_FALSE(detail::RankStatus::parse("").has_value());
}

// Ranks of two hosts; the ranks that are told apart share one, or not.
class OutOfStepOnTwoLevelsTest : public ::testing::TestWithParam<std::vector<int>> {
 protected:
  testing::RankOptions options() const { return {.hosts = testing::host_labels(GetParam())}; }
  int size() const { return static_cast<int>(GetParam().size()); }

  std::vector<std::string> errors_of(const testing::RankFunction& calls) const {
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::string> messages;
    for (const auto& error : try_ranks(size(), calls, options())) {
      messages.push_back(message_of(error));
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, 4s) << "found out within 2 s";
    return messages;
  }
};

TEST_P(OutOfStepOnTwoLevelsTest, OneRankInAnotherOperationIsNamedOnAll) {
  for (const int64_t numel : {100, 1'000'000}) {
    for (const int odd : {0, size() - 1}) {
      const auto errors = errors_of([&](World& world) {
        const auto tensor = torch::zeros({numel * size()});
        world.communicator().barrier("the start").wait();
        if (world.rank() == odd) {
          world.communicator().all_gather(tensor, "page \"b\"").wait();
        } else {
          world.communicator().all_reduce(tensor, ReduceOp::kSum, "page \"a\"").wait();
        }
      });
      for (int rank = 0; rank < size(); ++rank) {
        EXPECT_THAT(errors[rank], AllOf(HasSubstr("all_reduce #1 of page \"a\""),
                                        HasSubstr("all_gather #1 of page \"b\""),
                                        HasSubstr(" is out of step: it waits in ")))
            << rank << " with rank " << odd << " out of step";
      }
    }
  }
}

TEST_P(OutOfStepOnTwoLevelsTest, AHostThatIsABroadcastAheadIsNamedOnAll) {
  const auto errors = errors_of([&](World& world) {
    const auto tensor = torch::zeros({100'000});
    if (GetParam()[static_cast<size_t>(world.rank())] == 0) {
      world.communicator().broadcast(tensor, 0, "page \"a\"").wait();
    }
    world.communicator().all_reduce(tensor, ReduceOp::kSum, "page \"b\"").wait();
  });
  for (const std::string& error : errors) {
    EXPECT_THAT(error, HasSubstr(" is out of step: it waits in "));
    EXPECT_THAT(error, HasSubstr("of page \"b\""));
  }
}

TEST_P(OutOfStepOnTwoLevelsTest, AReceiverWhosePeerIsInACollectiveIsNamedOnBothRanks) {
  for (int sender = 1; sender < size(); ++sender) {
    const auto errors = errors_of([&](World& world) {
      world.communicator().all_reduce(torch::zeros({64}), ReduceOp::kSum, "the start").wait();
      if (world.rank() == 0) {
        world.communicator().recv(torch::zeros({64}), sender, "a message").wait();
      } else {
        world.communicator().barrier("the end of the step").wait();
      }
    });
    for (const int rank : {0, sender}) {
      EXPECT_THAT(errors[rank],
                  AllOf(HasSubstr("barrier #1 of the end of the step"),
                        HasSubstr(c10::str("recv #0 from rank ", sender, " of a message"))))
          << rank;
    }
  }
}

TEST_P(OutOfStepOnTwoLevelsTest, ASlowRankIsLeftAlone) {
  run_ranks(size(),
            [&](World& world) {
              const auto tensor = torch::full({100'000}, world.rank(), torch::kFloat32);
              const auto small = torch::zeros({10});
              for (int round = 0; round < 3; ++round) {
                if (world.rank() == round) std::this_thread::sleep_for(kLongerThanPatience);
                world.communicator().broadcast(tensor, (round + 1) % size(), "a page").wait();
                world.communicator().all_reduce(tensor, ReduceOp::kMax, "a page").wait();
                world.communicator().all_reduce(small, ReduceOp::kMax, "a loss").wait();
                if (world.rank() == round) std::this_thread::sleep_for(kLongerThanPatience);
                const int next = (round + 1) % size();
                if (world.rank() == round)
                  world.communicator().send(small, next, "a message").wait();
                if (world.rank() == next)
                  world.communicator().recv(small, round, "a message").wait();
                world.communicator().barrier("a round").wait();
              }
            },
            {.deadline = kQuickDeadline, .hosts = testing::host_labels(GetParam())});
}

TEST_P(OutOfStepOnTwoLevelsTest, ARankThatStoppedCallingIsNamedAtTheBusyLimit) {
  for (const int silent : {0, size() - 1}) {
    std::atomic<int> waiting{size() - 1};
    const auto errors = try_ranks(
        size(),
        [&](World& world) {
          world.communicator().barrier("the start").wait();
          if (world.rank() == silent) {
            while (waiting > 0) std::this_thread::sleep_for(10ms);
            return;
          }
          try {
            world.communicator().all_reduce(torch::zeros({64}), ReduceOp::kSum, "a page").wait();
          } catch (...) {
            --waiting;
            throw;
          }
        },
        {.deadline = kQuickDeadline,
         .busy_limit = kQuickDeadline,
         .hosts = testing::host_labels(GetParam())});
    std::string all;
    for (int rank = 0; rank < size(); ++rank) {
      if (rank == silent) continue;
      EXPECT_THAT(message_of(errors[rank]), HasSubstr("all_reduce #1 of a page")) << rank;
      all += message_of(errors[rank]);
    }
    EXPECT_THAT(all, HasSubstr(c10::str("rank ", silent, " was waited for in vain, for 1 s")));
  }
}

INSTANTIATE_TEST_SUITE_P(Hosts, OutOfStepOnTwoLevelsTest,
                         ::testing::Values(std::vector<int>{0, 0, 1}, std::vector<int>{0, 1, 0, 1},
                                           std::vector<int>{0, 0, 1, 1}),
                         [](const auto& info) {
                           std::string name = "Ranks";
                           for (const int host : info.param) name += std::to_string(host);
                           return name;
                         });

INSTANTIATE_TEST_SUITE_P(Transports, OutOfStepTest,
                         ::testing::Values(Transport::kGloo, Transport::kShared),
                         [](const auto& info) { return std::string(name(info.param)); });

}  // namespace
}  // namespace zeropage::comm::out_of_step_test
