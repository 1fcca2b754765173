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

// Its middle activations take the memory of a limit, unless they are computed again.
constexpr int64_t kDepth = 12, kWide = 64, kSamples = 1024;

struct BlockImpl : torch::nn::Module {
  BlockImpl() { linear = register_module("linear", torch::nn::Linear(kWide, kWide)); }
  torch::Tensor forward(const torch::Tensor& x) {
    return x + torch::dropout(torch::gelu(linear(x)).tanh(), 0.1, is_training());
  }
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Block);

struct DeepImpl : torch::nn::Module {
  DeepImpl() {
    for (int64_t layer = 0; layer < kDepth; ++layer) blocks->push_back(Block());
    register_module("blocks", blocks);
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return x;
  }
  torch::nn::ModuleList blocks;
};
TORCH_MODULE(Deep);

void train_deep(comm::World& world, SurvivingRun& run, int64_t limit_bytes) {
  torch::manual_seed(7);
  Options options{.stage = stage_of(3), .page_bytes = 4096};
  if (limit_bytes > 0) options.device_memory_bytes = limit_bytes;
  DistributedDataParallel<Deep> model(Deep(), world, options);
  Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(1e-2));
  RunState state;
  run.resume(model, optimizer, state);
  const MemoryRung rung = memory_rung(*model.module(), run.memory_rung());
  checkpointing::Recompute recompute = zeropage::recompute(model, rung.recompute);
  Accumulator accumulator(model, {.micro_steps = rung.parts});
  state.accumulator = &accumulator;
  while (state.step < 8) {
    // Large batches come late, and to one rank, which the other waits for.
    const int64_t samples = state.step < 4 || world.rank() == 0 ? 8 : kSamples;
    const auto batch =
        torch::full({samples, kWide}, 0.1 * static_cast<double>(state.step + world.rank()));
    optimizer.zero_grad();
    for (const torch::Tensor& part : batch.chunk(rung.parts)) {
      torch::Tensor loss;
      {
        const ActivationScope scope(recompute);
        loss = model(part).pow(2).mean();
      }
      accumulator.backward(loss);
    }
    accumulator.step(optimizer);
    ++state.step;
    run.end_step(model, optimizer, state);
  }
  const auto peak = world.max(torch::tensor(memory::Ledger::current()->at_peak().total()));
  model.eval();
  const GatheredParameters whole(model);
  if (world.rank() != 0) return;
  std::printf("hash=%016llx\nrung=%d peak=%lld\n", static_cast<unsigned long long>(hash_of(model)),
              run.memory_rung(), static_cast<long long>(peak.item<int64_t>()));
  for (const Restart& restart : run.restarts()) {
    std::printf("restart: %s, step %lld\n", restart.why.c_str(),
                static_cast<long long>(restart.step));
  }
}

std::function<int()> launch_deep(int64_t limit_bytes, int memory_rungs) {
  return [=] {
    return comm::launch_function(
        [=] {
          at::set_num_threads(1);
          survive(
              [=](comm::World& world, SurvivingRun& run) { train_deep(world, run, limit_bytes); },
              {.copy_every = 2,
               .world = {.deadline = std::chrono::seconds(20)},
               .memory_rungs = memory_rungs});
          return 0;
        },
        {.ranks = 2, .grace = std::chrono::seconds(20), .restarts = 4});
  };
}

int64_t number_in(const std::string& output, const std::string& name) {
  const size_t at = output.find(name + "=");
  return at == std::string::npos ? -1 : std::stoll(output.substr(at + name.size() + 1));
}

TEST(MemoryRungsTest, AStepThatNeeds1Point3TimesTheLimitTakesLessMemoryWithTheSameBits) {
  LaunchedProcess unlimited(launch_deep(0, 0));
  ASSERT_EQ(unlimited.wait(), 0) << unlimited.err();
  const int64_t limit = number_in(unlimited.out(), "peak") * 10 / 13;
  LaunchedProcess limited(launch_deep(limit, 4));
  EXPECT_EQ(limited.wait(), 0) << limited.err();
  EXPECT_EQ(hash_in(limited.out()), hash_in(unlimited.out())) << limited.out();
  EXPECT_EQ(number_in(limited.out(), "rung"), 2);
  EXPECT_THAT(limited.out(), HasSubstr("restart: rank 1 ran out of memory, step 4"));
  EXPECT_THAT(limited.err(),
              HasSubstr("rank 1 ran out of memory: the loop goes on on memory rung 1 of 4"));
  LaunchedProcess rungs_used_up(launch_deep(limit, 1));
  EXPECT_NE(rungs_used_up.wait(), 0);
  EXPECT_THAT(rungs_used_up.err(), HasSubstr("on memory rung 1 of 1"));
  EXPECT_THAT(rungs_used_up.err(), HasSubstr("would pass the limit of device memory"));
}

TEST(MemoryRungsTest, TakeLessAndLess) {
  const Deep deep;
  EXPECT_TRUE(memory_rung(*deep, 0).recompute.keeps_all);
  EXPECT_FALSE(memory_rung(*deep, 1).recompute.keeps_all);
  EXPECT_EQ(memory_rung(*deep, 2).recompute.blocks.parameters.size(), kDepth);
  EXPECT_EQ(memory_rung(*deep, 2).parts, 1);
  EXPECT_EQ(memory_rung(*deep, 5).parts, 8);
  EXPECT_THAT(memory_rung(*deep, 4).words, HasSubstr("micro-batches are cut into 4"));
  EXPECT_THAT(memory_rung(*torch::nn::Linear(2, 2), 2).words, HasSubstr("cheap operators"));
  EXPECT_THROW(memory_rung(*deep, -1), c10::Error);
}

}  // namespace
}  // namespace zeropage::survive_test
