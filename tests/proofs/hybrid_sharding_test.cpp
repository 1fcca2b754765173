// Sharded within groups of ranks and replicated over the groups: a run is that of one group of all ranks, with
// its bits where sums are in the same order.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/accumulated.h"
#include "tests/harness/delays.h"
#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "tests/harness/restarts.h"
#include "zero/setup/sharded_model.h"

namespace zeropage::hybrid_sharding_test {
namespace {

using namespace zeropage::testing;
using ::testing::HasSubstr;
using memory::operator""_KiB;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

constexpr int kSteps = 3;

Options options_of(int stage, int shard_within) {
  Options options;
  options.stage = stage_of(stage);
  options.shard_within = shard_within;
  options.page_bytes = 4_KiB;  // several pages
  return options;
}

struct Course {
  int ranks = 4;
  int micro_steps = 1;
  ReduceMicroSteps reduce = ReduceMicroSteps::kEach;
  std::optional<double> clip_norm = 0.5;
};

struct Trained {
  std::vector<torch::Tensor> parameters;
  std::vector<double> norms;
};

// All ranks have the same in the end.
template <typename Module>
Trained train(const Course& run, const Options& options, const RankOptions& rank_options = {}) {
  std::vector<Trained> by_rank(static_cast<size_t>(run.ranks));
  run_ranks(
      run.ranks,
      [&](comm::World& world) {
        DistributedDataParallel<Module> model(make_seeded<Module>(), world, options);
        Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
        Accumulator accumulator(
            model,
            {.micro_steps = run.micro_steps, .reduce = run.reduce, .clip_norm = run.clip_norm});
        Trained& own = by_rank[static_cast<size_t>(world.rank())];
        for (int step = 0; step < kSteps; ++step) {
          for (int micro = 0; micro < run.micro_steps; ++micro) {
            const Samples samples = samples_of(micro * run.ranks + world.rank(), step);
            accumulator.backward(loss_of(model(samples.inputs).to(torch::kFloat), samples));
          }
          own.norms.push_back(accumulator.step(optimizer).norm);
        }
        own.parameters = copies_of(model.parameters());
      },
      rank_options);
  for (const Trained& other : by_rank) {
    EXPECT_TRUE(same_bits(by_rank.front().parameters, other.parameters));
    EXPECT_EQ(by_rank.front().norms, other.norms);
  }
  return by_rank.front();
}

template <typename Module>
void expect_same(const Course& run, const Options& hybrid, const RankOptions& rank_options = {}) {
  Options full = hybrid;
  full.shard_within = Options::kAllRanks;
  const Trained expected = train<Module>(run, full);
  const Trained got = train<Module>(run, hybrid, rank_options);
  EXPECT_TRUE(same_bits(expected.parameters, got.parameters));
  EXPECT_EQ(expected.norms, got.norms);
}

class HybridTest : public ::testing::TestWithParam<int> {
 protected:
  HybridTest() { at::set_num_threads(1); }
};

TEST_P(HybridTest, OneMicroStepHasTheBitsOfOneGroup) {
  for (const auto& [ranks, within] : {std::pair{4, 2}, {8, 2}, {8, 4}, {6, 2}}) {
    SCOPED_TRACE(c10::str(ranks, " ranks in groups of ", within));
    expect_same<Oddball>({.ranks = ranks}, options_of(GetParam(), within));
    expect_same<Transformer>({.ranks = ranks}, options_of(GetParam(), within));
  }
}

TEST_P(HybridTest, MicroStepsReducedOnceHaveThemToo) {
  expect_same<Transformer>({.micro_steps = 3, .reduce = ReduceMicroSteps::kOnce},
                           options_of(GetParam(), 2));
}

TEST_P(HybridTest, WorldInvariantMicroStepsHaveThemToo) {
  Options options = options_of(GetParam(), 2);
  options.world_invariant = true;
  expect_same<Transformer>({.micro_steps = 3}, options);
}

TEST_P(HybridTest, OffloadedStatesHaveThemTooWhereverTheStepIsMade) {
  for (const StepWhen when : {StepWhen::kInStep, StepWhen::kInBackward}) {
    Options options = options_of(GetParam(), 2);
    options.offload = {.optimizer = memory::Tier::kHost, .step = when};
    expect_same<Transformer>({.clip_norm = {}}, options);
  }
}

TEST_P(HybridTest, LateOperationsChangeNothing) {
  RankOptions delayed;
  delayed.decorate = [](std::unique_ptr<comm::Communicator> inner) {
    return std::make_unique<DelayedCommunicator>(std::move(inner), std::chrono::milliseconds(3));
  };
  expect_same<Oddball>({}, options_of(GetParam(), 2), delayed);
}

// Sums over micro-steps come before those over groups, so their order is another.
TEST_P(HybridTest, MicroStepsReducedEachAreTheSameMean) {
  for (const bool low : {false, true}) {
    Options hybrid = options_of(GetParam(), 2);
    if (low) hybrid.compute_dtype = torch::kBFloat16;
    Options full = hybrid;
    full.shard_within = Options::kAllRanks;
    const Course run{.micro_steps = 3};
    const Trained expected = train<Transformer>(run, full);
    const Trained got = train<Transformer>(run, hybrid);
    for (int step = 0; step < kSteps; ++step) {
      const auto index = static_cast<size_t>(step);
      EXPECT_NEAR(got.norms[index] / expected.norms[index], 1, low ? 0.02 : 1e-5);
    }
  }
}

// Several backwards without an accumulator, and gradients that the user looks at and changes in between.
TEST_P(HybridTest, GradientsAreOfAllRanksAfterEveryBackward) {
  run_ranks(4, [&](comm::World& world) {
    DistributedDataParallel<Oddball> model(make_seeded<Oddball>(), world,
                                           options_of(GetParam(), 2));
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    auto plain = make_seeded<Oddball>();
    for (int backward = 0; backward < 2; ++backward) {
      const Samples own = samples_of(world.rank(), backward);
      loss_of(model(own.inputs), own).backward();
      for (int rank = 0; rank < 4; ++rank) {
        const Samples samples = samples_of(rank, backward);
        (loss_of(plain->forward(samples.inputs), samples) / 4).backward();
      }
      const auto expected = plain->parameters();
      const auto got = model.parameters();
      for (size_t index = 0; index < got.size(); ++index) {
        ASSERT_EQ(got[index].grad().defined(), expected[index].grad().defined());
        if (!got[index].grad().defined()) continue;
        EXPECT_TRUE(torch::allclose(got[index].grad() * 1, expected[index].grad(), 1e-4, 1e-6));
      }
    }
  });
}

// What each optimizer of the model steps of the mean, which the script has changed before and which no longer fits in
// what travels between ranks.
std::vector<torch::Tensor> stepped_in_turn(const Options& options, int ranks, size_t optimizers) {
  std::vector<torch::Tensor> trained;
  run_ranks(ranks, [&](comm::World& world) {
    DistributedDataParallel<Transformer> model(make_seeded<Transformer>(), world, options);
    const auto parameters = distinct_parameters(model.module());
    std::vector<std::vector<torch::Tensor>> parts(optimizers);
    for (size_t index = 0; index < parameters.size(); ++index) {
      parts[index % optimizers].push_back(parameters[index]);
    }
    std::vector<std::unique_ptr<Optimizer<torch::optim::SGD>>> all;
    for (const auto& part : parts) {
      all.push_back(std::make_unique<Optimizer<torch::optim::SGD>>(
          model, std::vector<torch::optim::OptimizerParamGroup>{{part}},
          torch::optim::SGDOptions(0.1)));
    }
    for (int step = 0; step < kSteps; ++step) {
      for (const auto& optimizer : all) optimizer->zero_grad();
      const Samples samples = samples_of(world.rank(), step);
      loss_of(model(samples.inputs).to(torch::kFloat), samples).backward();
      clip_grad_norm_(model, 0.1);
      for (const auto& optimizer : all) optimizer->step();
    }
    const auto own = copies_of(model.parameters());
    if (world.rank() == 0) trained = own;
  });
  return trained;
}

TEST_P(HybridTest, EachOfSeveralOptimizersStepsTheClippedMeanAsItIs) {
  for (const int ranks : {4, 6}) {
    for (const bool is_low : {false, true}) {
      SCOPED_TRACE(c10::str(ranks, is_low ? " ranks in bf16" : " ranks in fp32"));
      Options options = options_of(GetParam(), 2);
      if (is_low) options.compute_dtype = torch::kBFloat16;
      const auto by_one = stepped_in_turn(options, ranks, 1);
      EXPECT_TRUE(same_bits(by_one, stepped_in_turn(options, ranks, 2)));
      EXPECT_TRUE(same_bits(by_one, stepped_in_turn(options, ranks, 3)));
      if (is_low) continue;  // what groups give each other is rounded
      options.shard_within = Options::kAllRanks;
      EXPECT_TRUE(same_bits(by_one, stepped_in_turn(options, ranks, 2)));
    }
  }
}

TEST_P(HybridTest, AMeanThatIsKeptForTheNextBackwardIsNotRoundedAgain) {
  Options options = options_of(GetParam(), 2);
  options.compute_dtype = torch::kBFloat16;
  run_ranks(4, [&](comm::World& world) {
    DistributedDataParallel<Transformer> model(make_seeded<Transformer>(), world, options);
    const auto gradients_after = [&](int batch) {
      const Samples samples = samples_of(world.rank(), batch);
      loss_of(model(samples.inputs).to(torch::kFloat), samples).backward();
      if (batch == 0) clip_grad_norm_(model, 0.1);
      std::vector<torch::Tensor> gradients;
      for (const torch::Tensor& parameter : model.parameters()) {
        gradients.push_back(parameter.grad() * 1);
      }
      return gradients;
    };
    const auto first = gradients_after(0);
    const auto sum = gradients_after(1);
    for (torch::Tensor& parameter : model.parameters()) parameter.mutable_grad().reset();
    const auto second = gradients_after(1);
    std::vector<torch::Tensor> expected;
    for (size_t at = 0; at < first.size(); ++at) expected.push_back(first[at] + second[at]);
    EXPECT_TRUE(same_bits(expected, sum));
  });
}

TEST_P(HybridTest, ANonFiniteGradientOfOneRankSkipsTheStepOnAll) {
  run_ranks(4, [&](comm::World& world) {
    DistributedDataParallel<Oddball> model(make_seeded<Oddball>(), world,
                                           options_of(GetParam(), 2));
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    const auto before = copies_of(model.parameters());
    Accumulator accumulator(model, {});
    const Samples samples = samples_of(world.rank(), 0);
    accumulator.backward(loss_of(model(samples.inputs), samples) *
                         (world.rank() == 3 ? INFINITY : 1.0));
    EXPECT_FALSE(accumulator.step(optimizer).stepped());
    EXPECT_TRUE(same_bits(before, copies_of(model.parameters())));
  });
}

TEST_P(HybridTest, SavedStateIsThatOfOneGroupAndLoadsEitherWay) {
  const DiskFolder folder;
  const auto adamw = AdamWOptions(0.01);
  const auto at = [&](int shard_within) {
    return Setting{.stage = GetParam(), .ranks = 4, .options = {.shard_within = shard_within}};
  };
  const std::string full = folder.path() + "/full";
  const std::string hybrid = folder.path() + "/hybrid";
  trained<Oddball>(at(Options::kAllRanks), {.end = 2, .save = full}, adamw);
  trained<Oddball>(at(2), {.end = 2, .save = hybrid}, adamw);
  auto files_of_full = files_of(full);
  auto files_of_hybrid = files_of(hybrid);
  for (auto* files : {&files_of_full, &files_of_hybrid}) {
    std::erase_if(*files, [](const auto& file) { return file.first.ends_with(".json"); });
    EXPECT_GE(files->size(), 2u);
  }
  EXPECT_TRUE(files_of_full == files_of_hybrid);
  const auto expected = trained<Oddball>(at(Options::kAllRanks), {.end = 4}, adamw);
  for (const auto& [from, into] : {std::pair{full, 2}, {hybrid, 0}, {hybrid, 2}}) {
    EXPECT_TRUE(same_bits(expected,
                          trained<Oddball>(at(into), {.first = 2, .end = 4, .load = from}, adamw)));
  }
}

// Per step and rank, with bytes of all pages B: reduce-scatter and gathers of (A - 1) / A B within groups of A, an
// all-reduce of B / A between R groups, 2 (R - 1) / R of that, once a step whatever micro-steps there are.
TEST_P(HybridTest, GradientsTravelOnceAStepBetweenGroupsAndParametersNever) {
  constexpr int kMicroSteps = 3;
  run_ranks(4, [&](comm::World& world) {
    DistributedDataParallel<Transformer> model(make_seeded<Transformer>(), world,
                                               options_of(GetParam(), 2));
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    Accumulator accumulator(model, {.micro_steps = kMicroSteps, .reduce = ReduceMicroSteps::kEach});
    const zero::ParameterPages& pages = *sharded_parameters_of(model).pages;
    int64_t shard_bytes = 0;
    for (const zero::PageLayout& layout : pages.layouts()) shard_bytes += layout.shard_numel * 4;
    const auto within = pages.shards().communicator().wire_traffic();
    const auto between = pages.worlds().replicas->communicator().wire_traffic();
    for (int micro = 0; micro < kMicroSteps; ++micro) {
      const Samples samples = samples_of(world.rank(), micro);
      accumulator.backward(loss_of(model(samples.inputs), samples));
    }
    accumulator.step(optimizer);
    const auto sent_within = pages.shards().communicator().wire_traffic();
    const auto sent_between = pages.worlds().replicas->communicator().wire_traffic();
    EXPECT_EQ(sent_within.reduce_scatter.bytes - within.reduce_scatter.bytes,
              kMicroSteps * shard_bytes);
    EXPECT_EQ(sent_between.all_reduce.bytes - between.all_reduce.bytes, shard_bytes);
    EXPECT_EQ(sent_between.all_gather.bytes, 0);
    EXPECT_EQ(sent_between.broadcast.bytes - between.broadcast.bytes, 0);
  });
}

TEST_P(HybridTest, GradientsInTheMiddleOfAnAccumulationAreRefused) {
  const auto errors = try_ranks(4, [&](comm::World& world) {
    DistributedDataParallel<Oddball> model(make_seeded<Oddball>(), world,
                                           options_of(GetParam(), 2));
    Accumulator accumulator(model, {.micro_steps = 2, .reduce = ReduceMicroSteps::kEach});
    const Samples samples = samples_of(world.rank(), 0);
    accumulator.backward(loss_of(model(samples.inputs), samples));
    static_cast<void>(model.parameters().front().grad().sum());
  });
  for (const auto& error : errors) {
    EXPECT_THAT(message_of(error),
                HasSubstr("in the middle of an accumulation it is a sum over the "
                          "2 ranks of a group alone (options.shard_within)"));
  }
}

INSTANTIATE_TEST_SUITE_P(Stages, HybridTest, ::testing::Values(1, 2, 3));

TEST(HybridRefusalTest, GroupsThatAreNoneAreRefusedOnAllRanks) {
  const auto refusal_of = [](int ranks, const Options& options) {
    const auto errors = try_ranks(ranks, [&](comm::World& world) {
      const DistributedDataParallel<Oddball> model(make_seeded<Oddball>(), world, options);
    });
    for (const auto& error : errors) EXPECT_TRUE(error != nullptr);
    return message_of(errors.front());
  };
  EXPECT_THAT(refusal_of(4, options_of(2, 3)),
              HasSubstr("options.shard_within: 4 ranks do not divide into groups of 3"));
  EXPECT_THAT(refusal_of(2, options_of(2, 4)), HasSubstr("2 ranks do not divide into groups of 4"));
  EXPECT_THAT(refusal_of(2, options_of(2, 1)),
              HasSubstr("options.shard_within: expected 2 ranks or more"));
  EXPECT_THAT(refusal_of(2, options_of(0, 2)),
              HasSubstr("options.shard_within: stage 0 shards nothing"));
}

// ---- secondary shards ----

Options secondary_options(int within) {
  Options options = options_of(3, Options::kAllRanks);
  options.secondary_shard_within = within;
  return options;
}

TEST(SecondaryShardsTest, GiveTheBitsOfGathersOverAllRanks) {
  at::set_num_threads(1);
  for (const auto& [ranks, within] : {std::pair{4, 2}, {6, 3}, {4, 4}}) {
    SCOPED_TRACE(c10::str(ranks, " ranks in groups of ", within));
    for (const bool is_low : {false, true}) {
      for (const int micro_steps : {1, 3}) {
        Options with = secondary_options(within);
        if (is_low) with.compute_dtype = torch::kBFloat16;
        Options without = with;
        without.secondary_shard_within = Options::kNoSecondaryShards;
        const Course course{.ranks = ranks, .micro_steps = micro_steps};
        const Trained expected = train<Transformer>(course, without);
        const Trained got = train<Transformer>(course, with);
        EXPECT_TRUE(same_bits(expected.parameters, got.parameters)) << is_low << micro_steps;
        EXPECT_EQ(expected.norms, got.norms);
      }
    }
  }
}

// What each rank gathers in a step over all ranks, and in its group; and what it holds.
struct Gathers {
  int64_t over_all = 0;
  int64_t in_group = 0;
  int64_t parameter_bytes = 0;
};

Gathers gathers_of(const Options& options) {
  constexpr int kRanks = 4;
  std::vector<Gathers> by_rank(kRanks);
  run_ranks(kRanks, [&](comm::World& world) {
    DistributedDataParallel<Transformer> model(make_seeded<Transformer>(), world, options);
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    const zero::PageWorlds& worlds = sharded_parameters_of(model).pages->worlds();
    const auto sent = [](const comm::World& among) {
      return among.communicator().wire_traffic().all_gather.bytes;
    };
    const auto step = [&](int number) {
      optimizer.zero_grad();
      const Samples samples = samples_of(world.rank(), number);
      loss_of(model(samples.inputs), samples).backward();
      optimizer.step();
    };
    step(0);
    Gathers& own = by_rank[static_cast<size_t>(world.rank())];
    own = {-sent(world), worlds.secondary ? -sent(*worlds.secondary) : 0, 0};
    step(1);
    own.over_all += sent(world);
    if (worlds.secondary) own.in_group += sent(*worlds.secondary);
    own.parameter_bytes = memory::Ledger::current()->now()[memory::Kind::kParameter];
    EXPECT_EQ(own.parameter_bytes, sharded_parameters_of(model).pages->plan().held(
                                       2)[memory::Tier::kDevice][memory::Kind::kParameter]);
  });
  return by_rank[1];
}

TEST(SecondaryShardsTest, KeepBackwardsGathersInTheGroupForItsShareOfTheParameters) {
  Options with = secondary_options(2);
  with.parameter_budget_bytes = 8_KiB;  // nothing stays from forward to backward
  Options without = with;
  without.secondary_shard_within = Options::kNoSecondaryShards;
  const Gathers all = gathers_of(without), grouped = gathers_of(with);
  // 3 of 4 shards come from others, and 1 of 2 secondary ones.
  const int64_t backward = all.over_all - grouped.over_all;
  EXPECT_GT(backward, 0);
  EXPECT_EQ(grouped.in_group * 3, backward * 2);
  EXPECT_EQ(grouped.parameter_bytes, 3 * all.parameter_bytes);
}

TEST(SecondaryShardsTest, AreRefusedWhereNothingWouldBeGathered) {
  run_ranks(4, [](comm::World& world) {
    const auto refusal = [&](const std::function<void(Options&)>& change) {
      Options options = secondary_options(2);
      change(options);
      return error_of([&] {
        DistributedDataParallel<torch::nn::Linear>(torch::nn::Linear(4, 4), world, options);
      });
    };
    EXPECT_THAT(refusal([](Options& options) { options.stage = Stage::kGradients; }),
                HasSubstr("stage 2 gathers no parameters"));
    EXPECT_THAT(refusal([](Options& options) { options.reshard = Reshard::kAfterBackward; }),
                HasSubstr("gathers no page again"));
    EXPECT_THAT(refusal([](Options& options) { options.shard_within = 2; }),
                HasSubstr("gathered within a group already"));
    EXPECT_THAT(refusal([](Options& options) { options.secondary_shard_within = 3; }),
                HasSubstr("4 ranks do not divide into groups of 3"));
    EXPECT_THAT(refusal([](Options& options) { options.secondary_shard_within = 1; }),
                HasSubstr("expected 2 ranks or more"));
    EXPECT_THAT(refusal([](Options& options) {
                  options.offload.optimizer = options.offload.parameters = memory::Tier::kHost;
                }),
                HasSubstr("takes the shards away"));
  });
}

}  // namespace
}  // namespace zeropage::hybrid_sharding_test
