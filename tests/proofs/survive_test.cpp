// A run whose ranks die ends with the bits of one whose ranks do not.
#include "zeropage/survive.h"

#include <signal.h>
#include <sys/stat.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/comm/launched_process.h"
#include "tests/harness/disk_folder.h"
#include "zeropage/zeropage.h"

namespace zeropage::survive_test {
namespace {

using comm::LaunchedProcess;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kRanks = 3;
constexpr int64_t kSteps = 20;

// What happens to a run, before the step of that number is made: to the rank, in the first start alone unless it says otherwise.
using Fault = std::function<void(comm::World& world, const SurvivingRun& run, int64_t step)>;

void no_fault(comm::World& /*world*/, const SurvivingRun& /*run*/, int64_t /*step*/) {}

struct Training {
  int stage = 3;
  int64_t copy_every = 3;
  int restarts = 3;
  std::chrono::milliseconds deadline = std::chrono::seconds(20);
  std::chrono::milliseconds grace = std::chrono::seconds(20);
  Fault fault = no_fault;
  std::filesystem::path folder = {};
  // While it loads a copy.
  std::function<void(const comm::World& world)> at_load = [](const comm::World& /*world*/) {};
  bool resumes = true;
  bool seeds_inside = true;  // each rank otherwise, in the loop; false: all alike, before it
};

// A hash of the bytes of all parameters, in order.
uint64_t hash_of(const DistributedDataParallelBase& model) {
  uint64_t hash = 1469598103934665603U;
  for (const auto& parameter : model.parameters()) {
    const at::Tensor whole = parameter.detach().to(at::kFloat).contiguous();
    const auto* const bytes = static_cast<const unsigned char*>(whole.data_ptr());
    for (size_t i = 0; i < whole.nbytes(); ++i) hash = (hash ^ bytes[i]) * 1099511628211U;
  }
  return hash;
}

void train(comm::World& world, SurvivingRun& run, const Training& how) {
  if (how.seeds_inside) torch::manual_seed(7);
  DistributedDataParallel<torch::nn::Sequential> model(
      torch::nn::Sequential(torch::nn::Linear(16, 64), torch::nn::Tanh(), torch::nn::Dropout(0.2),
                            torch::nn::Linear(64, 64), torch::nn::Tanh(),
                            torch::nn::Linear(64, 16)),
      world, Options{.stage = stage_of(how.stage), .page_bytes = 4096});
  Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(1e-2));
  if (how.seeds_inside) torch::manual_seed(100 + world.rank());
  RunState state;
  double noted = 0;
  state.extras["noted"] = {[&] { return std::to_string(noted); },
                           [&](const std::string& text) {
                             how.at_load(world);
                             noted = std::stod(text);
                           }};
  if (how.resumes) run.resume(model, optimizer, state);
  while (state.step < kSteps) {
    how.fault(world, run, state.step);
    const auto batch = torch::full({4, 16}, 0.1 * static_cast<double>(state.step + world.rank()));
    optimizer.zero_grad();
    auto loss = model(batch).pow(2).mean();
    loss.backward();
    optimizer.step();
    noted += 1;
    ++state.step;
    run.end_step(model, optimizer, state);
  }
  model.eval();
  const GatheredParameters whole(model);
  if (world.rank() != 0) return;
  std::printf("hash=%016llx noted=%g\n", static_cast<unsigned long long>(hash_of(model)), noted);
  for (const Restart& restart : run.restarts()) {
    std::printf("restart: %s, step %lld, %s\n", restart.why.c_str(),
                static_cast<long long>(restart.step),
                restart.seconds > 0 && restart.seconds < 30 ? "in seconds" : "in no time");
  }
}

std::function<int()> launch(const Training& how) {
  return [how] {
    return comm::launch_function(
        [&how] {
          at::set_num_threads(1);
          torch::manual_seed(3);
          survive([&how](comm::World& world, SurvivingRun& run) { train(world, run, how); },
                  {.copy_every = how.copy_every,
                   .folder = how.folder,
                   .world = {.deadline = how.deadline}});
          return 0;
        },
        {.ranks = kRanks, .grace = how.grace, .restarts = how.restarts});
  };
}

std::string hash_in(const std::string& output) {
  const size_t at = output.find("hash=");
  return at == std::string::npos ? "none in " + output
                                 : output.substr(at, output.find('\n', at) - at);
}

// By stage, of a run that nothing happens to.
const std::string& unbroken(int stage) {
  static std::map<int, std::string> hashes;
  std::string& hash = hashes[stage];
  if (hash.empty()) {
    LaunchedProcess launched(launch({.stage = stage, .restarts = 0}));
    EXPECT_EQ(launched.wait(), 0) << launched.err();
    hash = hash_in(launched.out());
  }
  return hash;
}

Fault at_step(int rank, int64_t step, const std::function<void()>& action) {
  return [=](comm::World& world, const SurvivingRun& run, int64_t now) {
    if (run.restarts().empty() && world.rank() == rank && now == step) action();
  };
}

void die() {
  ::raise(SIGKILL);
}

class SurviveTest : public ::testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(SurviveTest, ARunWithAKilledRankEndsWithTheBitsOfOneWithout) {
  const auto [stage, victim] = GetParam();
  LaunchedProcess launched(launch({.stage = stage, .fault = at_step(victim, 11, die)}));
  EXPECT_EQ(launched.wait(), 0) << launched.err();
  EXPECT_EQ(hash_in(launched.out()), unbroken(stage)) << launched.err();
  // Step 9 is the newest copy, unless it was still being written.
  EXPECT_THAT(launched.out(),
              ::testing::ContainsRegex(c10::str("restart: rank ", victim,
                                                " was killed by signal 9, step [69], in seconds")));
  EXPECT_THAT(launched.err(), HasSubstr(c10::str("rank ", victim,
                                                 " was killed by signal 9: start "
                                                 "1 of 3 of all ranks from their last copy")));
}

// Rank 0 serves the store.
INSTANTIATE_TEST_SUITE_P(StagesAndVictims, SurviveTest,
                         ::testing::Values(std::make_tuple(0, 1), std::make_tuple(1, 0),
                                           std::make_tuple(2, 2), std::make_tuple(3, 0),
                                           std::make_tuple(3, 1)));

TEST(SurviveTest, ARankThatThrowsKeepsItsProcess) {
  LaunchedProcess launched(launch(
      {.fault = at_step(1, 7, [] { throw std::runtime_error("the loader's disk went away"); })}));
  EXPECT_EQ(launched.wait(), 0) << launched.err();
  EXPECT_EQ(hash_in(launched.out()), unbroken(3));
  EXPECT_THAT(launched.err(),
              HasSubstr("zeropage: rank 1 of 3 left its loop: the loader's disk went away"));
  EXPECT_THAT(launched.out(),
              ::testing::ContainsRegex("restart: rank 1 left its loop with an error, step [36]"));
}

// Such a process cannot begin anew.
TEST(SurviveTest, ARankWhoseModelOutlivesTheLoopIsStartedAgain) {
  static std::vector<comm::World> outside;
  const Fault fault = [](comm::World& world, const SurvivingRun& run, int64_t step) {
    if (!run.restarts().empty()) return;
    if (world.rank() == 2 && step == 1) outside.push_back(world);
    if (world.rank() == 0 && step == 7) die();
  };
  LaunchedProcess launched(launch({.fault = fault}));
  EXPECT_EQ(launched.wait(), 0) << launched.err();
  EXPECT_EQ(hash_in(launched.out()), unbroken(3));
  EXPECT_THAT(launched.err(),
              HasSubstr("[rank 2] zeropage: what the loop made lives on behind it"));
}

TEST(SurviveTest, ARankThatEndsByItselfIsStartedAgain) {
  LaunchedProcess launched(launch({.fault = at_step(2, 7, [] { ::_exit(3); })}));
  EXPECT_EQ(launched.wait(), 0) << launched.err();
  EXPECT_EQ(hash_in(launched.out()), unbroken(3));
  EXPECT_THAT(launched.out(),
              ::testing::ContainsRegex("restart: rank 2 exited with code 3, step [36]"));
}

// A process that lives has drawn numbers that a new one has not.
TEST(SurviveTest, GeneratorsThatWereSeededBeforeTheLoopComeBack) {
  LaunchedProcess unbroken(launch({.restarts = 0, .seeds_inside = false}));
  EXPECT_EQ(unbroken.wait(), 0) << unbroken.err();
  LaunchedProcess launched(launch({.fault = at_step(1, 11, die), .seeds_inside = false}));
  EXPECT_EQ(launched.wait(), 0) << launched.err();
  EXPECT_EQ(hash_in(launched.out()), hash_in(unbroken.out())) << launched.err();
}

// With one from outside the new model would have the old one's number of steps.
TEST(SurviveTest, AStateThatOutlivesTheLoopIsRefusedWithoutACopy) {
  LaunchedProcess launched([] {
    return comm::launch_function(
        [] {
          RunState outside;
          survive([&](comm::World& world, SurvivingRun& run) {
            DistributedDataParallel<torch::nn::Sequential> model(
                torch::nn::Sequential(torch::nn::Linear(2, 2)), world);
            Optimizer<torch::optim::SGD> optimizer(model, torch::optim::SGDOptions(0.1));
            run.resume(model, optimizer, outside);
            ++outside.step;
            throw std::runtime_error("the first step fails");
          });
          return 0;
        },
        {.ranks = 2, .restarts = 1});
  });
  EXPECT_EQ(launched.wait(), 1);
  EXPECT_THAT(launched.err(), HasSubstr("expected a RunState of step 0, got step 1"));
}

TEST(SurviveTest, RanksBehindTheLoopAreNotStartedAgain) {
  LaunchedProcess launched([] {
    return comm::launch_function(
        [] {
          survive([](comm::World& /*world*/, SurvivingRun& /*run*/) {});
          if (std::getenv("RANK") == std::string("1")) die();
          ::usleep(300'000);
          return 0;
        },
        {.ranks = 2, .restarts = 3});
  });
  EXPECT_EQ(launched.wait(), 128 + SIGKILL);
  EXPECT_THAT(launched.err(), Not(HasSubstr("start 1 of 3")));
}

TEST(SurviveTest, ASecondLoopInOneProcessIsRefused) {
  LaunchedProcess launched([] {
    return comm::launch_function(
        [] {
          const auto loop = [](comm::World& /*world*/, SurvivingRun& /*run*/) {};
          survive(loop);
          survive(loop);
          return 0;
        },
        {.ranks = 1, .restarts = 3});
  });
  EXPECT_EQ(launched.wait(), 1);
  EXPECT_THAT(launched.err(), HasSubstr("was called before in this process"));
}

TEST(SurviveTest, ARankThatStandsStillBesideACopyHoldsTheOthersNoLonger) {
  const Fault fault = [](comm::World& world, const SurvivingRun& run, int64_t step) {
    if (run.restarts().empty() && step == 9 && world.rank() == 1) ::raise(SIGSTOP);
  };
  LaunchedProcess launched(launch({.copy_every = 1,
                                   .deadline = std::chrono::milliseconds(1500),
                                   .grace = std::chrono::milliseconds(700),
                                   .fault = fault}));
  EXPECT_EQ(launched.wait(), 0) << launched.err();
  EXPECT_LT(launched.seconds(), 60.0);
  EXPECT_EQ(hash_in(launched.out()), unbroken(3));
  EXPECT_THAT(launched.out(), HasSubstr("restart: rank 1 left its loop with an error"));
}

TEST(SurviveTest, ARankThatStandsStillIsKilledAndStartedAgain) {
  LaunchedProcess launched(launch({.deadline = std::chrono::milliseconds(1500),
                                   .grace = std::chrono::milliseconds(700),
                                   .fault = at_step(1, 7, [] { ::raise(SIGSTOP); })}));
  EXPECT_EQ(launched.wait(), 0) << launched.err();
  EXPECT_EQ(hash_in(launched.out()), unbroken(3));
  EXPECT_THAT(launched.err(),
              HasSubstr("rank 1 did not leave its loop within 0.7 s: sending SIGKILL"));
}

// By default a load waits ten minutes for it.
TEST(SurviveTest, ARankThatStandsStillWhileItLoadsACopyIsKilledAndStartedAgain) {
  const testing::DiskFolder folder;
  const std::string once = folder.path() + "/stood";
  LaunchedProcess launched(launch({.deadline = std::chrono::milliseconds(1500),
                                   .grace = std::chrono::milliseconds(700),
                                   .fault = at_step(0, 7, die),
                                   .at_load = [&](const comm::World& world) {
                                     if (world.rank() != 1) return;
                                     if (::mkdir(once.c_str(), 0700) == 0) ::raise(SIGSTOP);
                                   }}));
  EXPECT_EQ(launched.wait(), 0);
  EXPECT_LT(launched.seconds(), 60.0);
  EXPECT_EQ(hash_in(launched.out()), unbroken(3));
}

TEST(SurviveTest, RanksThatAreOutOfStepOnceGoBack) {
  const Fault fault = [](comm::World& world, const SurvivingRun& run, int64_t step) {
    if (run.restarts().empty() && step == 7 && world.rank() == 1) world.sum(1.0);
  };
  LaunchedProcess launched(launch({.fault = fault}));
  EXPECT_EQ(launched.wait(), 0) << launched.err();
  EXPECT_EQ(hash_in(launched.out()), unbroken(3));
  EXPECT_THAT(launched.err(), HasSubstr("out of step"));
}

TEST(SurviveTest, RanksThatDieTogetherAndDieAgainAreSurvived) {
  const Fault fault = [](comm::World& world, const SurvivingRun& run, int64_t step) {
    if (run.restarts().empty() && step == 8 && world.rank() != 1) die();
    if (run.restarts().size() == 1 && step == 13 && world.rank() == 1) die();
  };
  LaunchedProcess launched(launch({.restarts = 6, .fault = fault}));
  EXPECT_EQ(launched.wait(), 0) << launched.err();
  EXPECT_EQ(hash_in(launched.out()), unbroken(3)) << launched.err();
}

// Before there is a copy the loop begins anew.
TEST(SurviveTest, ARunThatFailsBeforeItsFirstCopyBeginsAnew) {
  LaunchedProcess launched(launch({.copy_every = 10, .fault = at_step(0, 2, die)}));
  EXPECT_EQ(launched.wait(), 0) << launched.err();
  EXPECT_EQ(hash_in(launched.out()), unbroken(3));
  EXPECT_THAT(launched.out(), HasSubstr("restart: rank 0 was killed by signal 9, step 0"));
}

TEST(SurviveTest, ARankThatDiesInEveryStartEndsTheRun) {
  const Fault fault = [](comm::World& world, const SurvivingRun& /*run*/, int64_t step) {
    if (step == 5 && world.rank() == 1)
      throw std::runtime_error("a batch that nobody can train on");
  };
  LaunchedProcess launched(launch({.restarts = 2, .fault = fault}));
  EXPECT_EQ(launched.wait(), 1);
  EXPECT_THAT(launched.err(), HasSubstr("start 2 of 2 of all ranks"));
  EXPECT_THAT(launched.err(), Not(HasSubstr("start 3")));
  EXPECT_THAT(launched.err(), HasSubstr("zeropage: rank 1 ended by an exception: a batch that "
                                        "nobody can train on"));
}

TEST(SurviveTest, ALoopThatDoesNotResumeIsRefused) {
  LaunchedProcess launched(launch({.restarts = 0, .resumes = false}));
  EXPECT_EQ(launched.wait(), 1);
  EXPECT_THAT(launched.err(), HasSubstr("resume() was not called in this call of the loop"));
}

TEST(SurviveTest, WithAFolderALaterLaunchGoesOnWithoutARestart) {
  const testing::DiskFolder folder;
  const std::filesystem::path states = std::filesystem::path(folder.path()) / "run";
  {
    LaunchedProcess first(launch({.restarts = 0, .fault = at_step(1, 11, die), .folder = states}));
    EXPECT_EQ(first.wait(), 128 + SIGKILL);
  }
  LaunchedProcess second(launch({.restarts = 0, .folder = states}));
  EXPECT_EQ(second.wait(), 0) << second.err();
  EXPECT_EQ(hash_in(second.out()), unbroken(3));
}

TEST(SurviveTest, CopiesGoWithTheLaunch) {
  const testing::DiskFolder folder;
  LaunchedProcess launched([&] {
    return comm::launch_function(
        [] {
          const auto copies = comm::environment_variable("ZEROPAGE_COPIES");
          return copies && std::filesystem::is_directory(*copies) ? 0 : 1;
        },
        {.ranks = 2, .restarts = 1, .copies_in = folder.path()});
  });
  EXPECT_EQ(launched.wait(), 0) << launched.err();
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(SurviveTest, CopiesOfAKilledLaunchAreRemovedByTheNext) {
  const testing::DiskFolder folder;
  const comm::LaunchOptions options{.ranks = 1, .restarts = 1, .copies_in = folder.path()};
  {
    LaunchedProcess launched([&] {
      return comm::launch_function(
          [] {
            ::sleep(30);
            return 0;
          },
          options);
    });
    EXPECT_TRUE(comm::holds_within(5, [&] {
      for (const auto& copies : std::filesystem::directory_iterator(folder.path())) {
        if (std::filesystem::exists(copies.path() / "lock")) return true;
      }
      return false;
    }));
    ::usleep(200'000);
  }
  EXPECT_FALSE(std::filesystem::is_empty(folder.path()));
  // Its rank, which is a fork, holds the lock until it has died, too.
  ::usleep(500'000);
  LaunchedProcess next([&] { return comm::launch_function([] { return 0; }, options); });
  EXPECT_EQ(next.wait(), 0);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

}  // namespace
}  // namespace zeropage::survive_test
