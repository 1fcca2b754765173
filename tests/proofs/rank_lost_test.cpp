// No silent hang: a rank that dies ends the others with its name in seconds, one that is stopped at
// the deadline.
#include <signal.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/comm/launched_process.h"
#include "tests/harness/endless_training.h"
#include "tests/pipeline/pipeline_models.h"
#include "zeropage/check.h"
#include "zeropage/zeropage.h"

namespace zeropage::rank_lost_test {
namespace {

using comm::LaunchedProcess;

int train_until_signal(comm::World& world, int victim, int stage, int signal) {
  try {
    at::set_num_threads(1);
    testing::train_endlessly(world, stage, [&](int step) {
      if (step == 3 && world.rank() == victim) ::raise(signal);
    });
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", memory::message_of(error).c_str());
    return 1;
  }
}

class RankLostTest : public ::testing::TestWithParam<std::tuple<int, int, int, comm::Transport>> {};

TEST_P(RankLostTest, TheOthersEndWithItsNameInSeconds) {
  const auto [ranks, victim, stage, transport] = GetParam();
  LaunchedProcess launched([ranks = ranks, victim = victim, stage = stage, transport = transport] {
    return comm::World::launch(
        ranks,
        [=](comm::World& world) { return train_until_signal(world, victim, stage, SIGKILL); },
        {.transport = transport});
  });
  EXPECT_EQ(launched.wait(), 128 + SIGKILL);
  EXPECT_LT(launched.seconds(), 15.0) << "start-up included; the deadline is 60 s";
  const std::string errors = launched.err();
  EXPECT_THAT(errors, ::testing::HasSubstr(c10::str("rank ", victim, " (pid ")));
  EXPECT_THAT(errors, ::testing::HasSubstr("was killed by SIGKILL"));
  EXPECT_THAT(errors, ::testing::HasSubstr(c10::str("lost rank ", victim)));
}

using comm::Transport;

INSTANTIATE_TEST_SUITE_P(RanksVictimsStages, RankLostTest,
                         ::testing::Values(std::make_tuple(2, 0, 1, Transport::kGloo),
                                           std::make_tuple(2, 1, 0, Transport::kGloo),
                                           std::make_tuple(2, 1, 3, Transport::kGloo),
                                           std::make_tuple(4, 2, 1, Transport::kGloo),
                                           std::make_tuple(4, 2, 3, Transport::kGloo),
                                           std::make_tuple(2, 0, 1, Transport::kShared),
                                           std::make_tuple(2, 1, 3, Transport::kShared),
                                           std::make_tuple(4, 2, 3, Transport::kShared)));

// Ranks of this host that take each other for ranks of two; rank % 2 is the host.
int launch_on_two_hosts(int ranks, const std::function<int(comm::World&)>& function,
                        const comm::WorldOptions& options, comm::LaunchOptions launch = {}) {
  launch.ranks = ranks;
  return comm::launch_function(
      [&] {
        comm::Place place = comm::read_place();
        place.host = c10::str("host ", place.rank % 2);
        comm::World world(place, comm::open_store(place, options.deadline), options);
        return function(world);
      },
      launch);
}

class RankOfTwoHostsLostTest : public ::testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(RankOfTwoHostsLostTest, TheOthersEndWithItsNameInSeconds) {
  const auto [victim, stage] = GetParam();
  constexpr int kRanks = 4;
  LaunchedProcess launched([victim = victim, stage = stage] {
    return launch_on_two_hosts(
        kRanks,
        [=](comm::World& world) { return train_until_signal(world, victim, stage, SIGKILL); }, {});
  });
  EXPECT_EQ(launched.wait(), 128 + SIGKILL);
  EXPECT_LT(launched.seconds(), 15.0) << "start-up included; the deadline is 60 s";
  const std::string errors = launched.err();
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank == victim) continue;
    EXPECT_THAT(errors,
                ::testing::ContainsRegex(c10::str(
                    "\\[rank ", rank, "\\] error: [^\n]* #[0-9]+ of [^\n]*lost rank ", victim)));
  }
}

INSTANTIATE_TEST_SUITE_P(VictimsStages, RankOfTwoHostsLostTest,
                         ::testing::Combine(::testing::Values(0, 1, 2), ::testing::Values(1, 3)));

// Trains by stages until the victim is killed at the forward of the second step's third micro-batch.
int train_stages_until_killed(comm::World& world, int victim, parallel::ScheduleKind schedule) {
  try {
    at::set_num_threads(1);
    const pipeline_models::Shape shape{.pipeline = 3, .stage = 1, .schedule = schedule};
    int forwards = 0;
    PipelineOptions options;
    options.run_forward = [&](const std::function<at::Tensor()>& forward) {
      if (world.rank() == victim && ++forwards == shape.micro_batches + 3) ::raise(SIGKILL);
      return forward();
    };
    pipeline_models::PipelineRun run(world, shape, options);
    for (int64_t step = 0;; ++step) run.step(step);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", memory::message_of(error).c_str());
    return 1;
  }
}

class RankOfAPipelineLostTest
    : public ::testing::TestWithParam<std::tuple<int, parallel::ScheduleKind>> {};

TEST_P(RankOfAPipelineLostTest, TheOthersEndWithItsNameAndTheirOwnAction) {
  const auto [victim, schedule] = GetParam();
  LaunchedProcess launched([victim = victim, schedule = schedule] {
    return comm::World::launch(
        3, [=](comm::World& world) { return train_stages_until_killed(world, victim, schedule); },
        {});
  });
  EXPECT_EQ(launched.wait(), 128 + SIGKILL);
  EXPECT_LT(launched.seconds(), 15.0) << "start-up included; the deadline is 60 s";
  for (const int rank : {0, 1, 2}) {
    if (rank == victim) continue;
    EXPECT_THAT(launched.err(),
                ::testing::ContainsRegex(c10::str(
                    "\\[rank ", rank, "\\] error: [^\n]*stage ", rank,
                    " of 3, (forward|backward) of micro-batch [0-3]: [^\n]*lost rank ", victim)));
  }
}

INSTANTIATE_TEST_SUITE_P(
    VictimsSchedules, RankOfAPipelineLostTest,
    ::testing::Values(std::make_tuple(0, parallel::ScheduleKind::kGPipe),
                      std::make_tuple(1, parallel::ScheduleKind::kOneForwardOneBackward),
                      std::make_tuple(2, parallel::ScheduleKind::kOneForwardOneBackward)));

class RankStoppedTest : public ::testing::TestWithParam<std::tuple<int, Transport>> {};

TEST_P(RankStoppedTest, TheOthersSayAtTheDeadlineWhereItWasLastHeard) {
  const auto [victim, transport] = GetParam();
  LaunchedProcess launched([victim = victim, transport = transport] {
    return comm::World::launch(
        3,
        [=](comm::World& world) { return train_until_signal(world, victim, /*stage=*/1, SIGSTOP); },
        {.deadline = std::chrono::seconds(6), .transport = transport},
        {.grace = std::chrono::seconds(4)});
  });
  EXPECT_EQ(launched.wait(), 1);
  EXPECT_LT(launched.seconds(), 30.0);
  const std::string errors = launched.err();
  EXPECT_THAT(errors,
              ::testing::HasSubstr(c10::str("rank ", victim, " did not answer within 6 s")));
  EXPECT_THAT(errors,
              ::testing::ContainsRegex(c10::str("Rank ", victim, " was last (heard )?in ")));
  if (transport == Transport::kShared) {
    EXPECT_THAT(errors, ::testing::HasSubstr("is stopped (SIGSTOP"));
  }
}

// Rank 0 serves the store, which then does not answer either.
INSTANTIATE_TEST_SUITE_P(Victims, RankStoppedTest,
                         ::testing::Combine(::testing::Values(0, 1),
                                            ::testing::Values(Transport::kGloo,
                                                              Transport::kShared)));

}  // namespace
}  // namespace zeropage::rank_lost_test
