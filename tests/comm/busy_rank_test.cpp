// Ranks that do work of their own while the others wait for them.
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/ranks.h"

namespace zeropage::comm::busy_rank_test {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;
using testing::try_ranks;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

void be_busy(std::chrono::milliseconds time) {
  std::this_thread::sleep_for(time);
}

struct Case {
  const char* name;
  Transport transport;
  std::vector<int> hosts;  // of three ranks
};

class BusyRankTest : public ::testing::TestWithParam<Case> {
 protected:
  static constexpr int kRanks = 3;

  testing::RankOptions options(std::chrono::milliseconds busy_limit = 30s) const {
    return {.deadline = 1s,
            .busy_limit = busy_limit,
            .transport = GetParam().transport,
            .hosts = testing::host_labels(GetParam().hosts)};
  }
};

TEST_P(BusyRankTest, IsWaitedForBeyondTheDeadline) {
  for (const int busy : {0, 1}) {
    run_ranks(
        kRanks,
        [&](World& world) {
          const auto tensor = torch::full({100'000}, world.rank(), torch::kFloat32);
          if (world.rank() == busy) be_busy(1400ms);
          world.communicator().all_reduce(tensor, ReduceOp::kMax, "page \"a\"").wait();
          EXPECT_TRUE(tensor.eq(kRanks - 1).all().item<bool>());
        },
        options());
  }
}

TEST_P(BusyRankTest, IsWaitedForInAPairAndByThoseBehindIt) {
  run_ranks(
      kRanks,
      [&](World& world) {
        const auto tensor = torch::zeros({10});
        if (world.rank() == 2) {
          be_busy(1400ms);
          world.communicator().send(tensor, 1, "a message").wait();
        }
        if (world.rank() == 1) world.communicator().recv(tensor, 2, "a message").wait();
        world.communicator().barrier("the end of the step").wait();
      },
      options());
}

TEST_P(BusyRankTest, IsNamedWithItsLastCallByOneRankOnStderr) {
  auto reporting = options();
  reporting.report_interval = 600ms;
  ::testing::internal::CaptureStderr();
  const auto errors = try_ranks(
      kRanks,
      [&](World& world) {
        const auto tensor = torch::zeros({64});
        world.communicator().all_reduce(tensor, ReduceOp::kSum, "page \"a\"").wait();
        if (world.rank() == 1) be_busy(2000ms);
        world.communicator().all_gather(torch::zeros({3}), "page \"b\"").wait();
      },
      reporting);
  const std::string lines = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(
      lines, ContainsRegex("zeropage: .rank 0/3. has waited 0\\.[6-9] s for rank 1, in all_gather "
                           "#1 of page \"b\" .12 B.: it lives, and has been busy outside all "
                           "calls for [01]\\.[0-9] s. Rank 1 was last in all_reduce #0 of page "
                           "\"a\" .256 B.. It is waited for up to 30 s .WorldOptions::busy_limit"));
  const auto count = std::count(lines.begin(), lines.end(), '\n');
  EXPECT_GE(count, 2) << lines;
  EXPECT_LE(count, 3) << lines;
}

TEST_P(BusyRankTest, EndsTheOthersAtTheBusyLimit) {
  std::atomic<int> waiting{kRanks - 1};
  const auto start = Clock::now();
  const auto errors = try_ranks(
      kRanks,
      [&](World& world) {
        world.communicator().all_reduce(torch::zeros({64}), ReduceOp::kSum, "page \"a\"").wait();
        if (world.rank() == 1) {
          while (waiting > 0) be_busy(10ms);
          return;
        }
        try {
          world.communicator().all_gather(torch::zeros({3}), "page \"b\"").wait();
        } catch (...) {
          --waiting;
          throw;
        }
      },
      options(/*busy_limit=*/1500ms));
  EXPECT_LT(Clock::now() - start, 6s);
  for (const int rank : {0, 2}) {
    EXPECT_THAT(message_of(errors[rank]),
                AllOf(HasSubstr(c10::str("[rank ", rank,
                                         "/3] all_gather #1 of page \"b\" (12 B): rank 1 "
                                         "was waited for in vain, for 1.5 s: it lives")),
                      HasSubstr("Rank 1 was last in all_reduce #0 of page \"a\" (256 B)"),
                      HasSubstr("raise WorldOptions::busy_limit")));
  }
}

TEST_P(BusyRankTest, IsWaitedForByAgreementsBeyondTheDeadline) {
  for (const int busy : {0, 2}) {
    run_ranks(
        kRanks,
        [&](World& world) {
          if (world.rank() == busy) be_busy(1400ms);
          world.check_agreement("the model", {"stage: 1"});
          const auto texts = world.gather_text("a test", std::to_string(world.rank()));
          EXPECT_THAT(texts, ::testing::ElementsAre("0", "1", "2"));
        },
        options());
  }
}

TEST_P(BusyRankTest, IsWaitedForBesideAnotherThread) {
  run_ranks(
      kRanks,
      [&](World& world) {
        const World beside = world.beside("a saver", 800ms);
        std::string answer;
        std::thread saver([&] {
          if (world.rank() == 2) be_busy(1400ms);
          try {
            answer = beside.settle("a state", "text", [](const auto& texts) { return texts[2]; });
          } catch (const std::exception& error) {
            answer = error.what();
          }
        });
        // The thread that calls goes on.
        world.communicator().barrier("a step").wait();
        saver.join();
        EXPECT_EQ(answer, "text");
      },
      options());
}

TEST_P(BusyRankTest, EndsAgreementsAtTheBusyLimit) {
  std::atomic<int> waiting{kRanks - 1};
  const auto errors = try_ranks(
      kRanks,
      [&](World& world) {
        world.communicator().barrier("the start").wait();
        if (world.rank() == 1) {
          while (waiting > 0) be_busy(10ms);
          return;
        }
        try {
          world.check_agreement("the model", {"stage: 1"});
        } catch (...) {
          --waiting;
          throw;
        }
      },
      options(/*busy_limit=*/1500ms));
  for (const int rank : {0, 2}) {
    EXPECT_THAT(message_of(errors[rank]),
                AllOf(HasSubstr("the model: rank 1 was waited for in vain, for 1.5 s"),
                      HasSubstr("Rank 1 was last in barrier #0 of the start")));
  }
}

// The one cannot come to the other's call, whatever they do later.
TEST_P(BusyRankTest, IsToldFromOneThatWaitsForTextsInstead) {
  auto patient = options();
  patient.deadline = 30s;
  const auto start = Clock::now();
  const auto errors = try_ranks(
      kRanks,
      [&](World& world) {
        world.communicator().barrier("the start").wait();
        if (world.rank() == 1) {
          world.check_agreement("the model", {"stage: 1"});
        } else {
          world.communicator().all_reduce(torch::zeros({64}), ReduceOp::kSum, "page \"a\"").wait();
        }
      },
      patient);
  EXPECT_LT(Clock::now() - start, 5s) << "found out within 2 s";
  for (const int rank : {0, 2}) {
    EXPECT_THAT(message_of(errors[rank]),
                AllOf(HasSubstr("all_reduce #1 of page \"a\""),
                      HasSubstr("is out of step: it waits for texts of \"the model\"")));
  }
  EXPECT_THAT(message_of(errors[1]), AllOf(HasSubstr("the model: "), HasSubstr("rank ")));
}

INSTANTIATE_TEST_SUITE_P(Transports, BusyRankTest,
                         ::testing::Values(Case{"Gloo", Transport::kGloo, {0, 0, 0}},
                                           Case{"Shared", Transport::kShared, {0, 0, 0}},
                                           Case{"TwoLevels", Transport::kAuto, {0, 0, 1}}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace zeropage::comm::busy_rank_test
