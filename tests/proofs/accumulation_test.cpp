// Micro-batches that are accumulated are one step: plain LibTorch's bits by either policy, the same
// bits however micro-batches are split over ranks, and the mean over tokens.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/accumulated.h"
#include "tests/harness/delays.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"

namespace zeropage::accumulation_test {
namespace {

using namespace zeropage::testing;
using ::testing::HasSubstr;
using memory::operator""_KiB;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

constexpr int kSteps = 2;

Options options_of(int stage) {
  Options options;
  options.update_by = UpdateBy::kClass;  // whose bits a plain run has
  options.stage = stage_of(stage);
  options.page_bytes = 4_KiB;  // several pages
  return options;
}

// ---- parity ----

template <typename Module>
void expect_parity(const Accumulation& how, const Options& options,
                   const RankOptions& rank_options = {}) {
  const auto expected = train_accumulated_reference<Module>(how, kSteps);
  run_ranks(
      how.ranks,
      [&](comm::World& world) {
        DistributedDataParallel<Module> model(make_seeded<Module>(), world, options);
        Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
        Accumulator accumulator(model, {.micro_steps = how.micro_steps, .reduce = how.reduce});
        for (int step = 0; step < kSteps; ++step) {
          const StepReport report = accumulated_step(model, accumulator, optimizer, step);
          EXPECT_TRUE(report.stepped()) << report.to_string();
          EXPECT_EQ(report.weight, how.ranks * how.micro_steps);
        }
        EXPECT_TRUE(same_bits(expected, model.parameters()))
            << "rank " << world.rank() << ", " << how.micro_steps << " micro-steps, "
            << (how.reduce == ReduceMicroSteps::kEach ? "each" : "once");
      },
      rank_options);
}

class AccumulationParityTest : public ::testing::TestWithParam<std::tuple<int, int>> {
 protected:
  AccumulationParityTest() { at::set_num_threads(1); }
  template <typename Module>
  void expect_parity_of(const std::vector<int>& all_micro_steps, ReduceMicroSteps reduce) const {
    const auto [ranks, stage] = GetParam();
    for (const int micro_steps : all_micro_steps) {
      expect_parity<Module>({ranks, micro_steps, reduce}, options_of(stage));
    }
  }
  void expect_parity_by(ReduceMicroSteps reduce) const {
    expect_parity_of<Oddball>({1, 2, 3, 8}, reduce);
    expect_parity_of<Transformer>({1, 3}, reduce);
    expect_parity_of<ConvNet>({2, 8}, reduce);
  }
};

TEST_P(AccumulationParityTest, OfMicroStepsReducedEach) {
  expect_parity_by(ReduceMicroSteps::kEach);
}

TEST_P(AccumulationParityTest, OfMicroStepsReducedOnce) {
  expect_parity_by(ReduceMicroSteps::kOnce);
}

TEST_P(AccumulationParityTest, WhenOperationsAreLateAndRanksUneven) {
  const auto [ranks, stage] = GetParam();
  RankOptions delayed;
  delayed.decorate = [](std::unique_ptr<comm::Communicator> inner) {
    return std::make_unique<DelayedCommunicator>(std::move(inner), std::chrono::milliseconds(3));
  };
  for (const auto reduce : {ReduceMicroSteps::kEach, ReduceMicroSteps::kOnce}) {
    expect_parity<Oddball>({ranks, 3, reduce}, options_of(stage), delayed);
  }
}

INSTANTIATE_TEST_SUITE_P(RanksStages, AccumulationParityTest,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4),
                                            ::testing::Values(0, 1, 2, 3)));

// ---- what is chosen by default ----

// With gradients whose sums fp32 holds exactly, in whatever order they are added up.
std::vector<torch::Tensor> trained_exactly(int ranks, const Options& options,
                                           ReduceMicroSteps reduce) {
  std::vector<torch::Tensor> trained;
  run_ranks(ranks, [&](comm::World& world) {
    DistributedDataParallel<Ragged> model(make_seeded<Ragged>(), world, options);
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    Accumulator accumulator(model, {.micro_steps = 4, .reduce = reduce, .clip_norm = 2.0});
    for (int step = 0; step < 3; ++step) {
      for (int micro = 0; micro < 4; ++micro) {
        const int index = (step * 4 + micro) * world.size() + world.rank();
        accumulator.backward(loss_with_known_gradients(model.named_parameters(), index));
      }
      EXPECT_TRUE(accumulator.step(optimizer).stepped());
    }
    const auto parameters = copies_of(model.parameters());
    if (world.rank() == 0) trained = parameters;
  });
  return trained;
}

TEST(DefaultReductionTest, GivesTheBitsOfEitherPolicyAtEveryStageWhereSumsAreExact) {
  for (const int ranks : {2, 3}) {
    const auto expected = trained_exactly(ranks, options_of(0), ReduceMicroSteps::kEach);
    for (const int stage : {0, 1, 2, 3}) {
      for (const auto reduce :
           {ReduceMicroSteps::kAuto, ReduceMicroSteps::kEach, ReduceMicroSteps::kOnce}) {
        EXPECT_TRUE(same_bits(expected, trained_exactly(ranks, options_of(stage), reduce)))
            << ranks << " ranks, stage " << stage << ", policy " << static_cast<int>(reduce);
      }
    }
  }
}

TEST(DefaultReductionTest, GivesTheBitsOfEitherPolicyWithTheOptimizerOnTheHost) {
  Options on_host = options_of(1);
  on_host.update_by = UpdateBy::kFused;
  const auto expected = trained_exactly(2, on_host, ReduceMicroSteps::kEach);
  on_host.offload.optimizer = memory::Tier::kHost;
  for (const auto reduce : {ReduceMicroSteps::kAuto, ReduceMicroSteps::kEach}) {
    EXPECT_TRUE(same_bits(expected, trained_exactly(2, on_host, reduce)));
  }
}

// ---- any split of the same micro-batches ----

// Experts: parts for micro-batches of even and of odd index, and one that the first do not use.
struct ExpertsImpl : torch::nn::Module {
  ExpertsImpl() {
    shared = register_module("shared", torch::nn::Linear(7, 40));
    for (int expert = 0; expert < 3; ++expert) {
      experts.push_back(register_module(c10::str("expert", expert), torch::nn::Linear(40, 40)));
    }
    last = register_module("last", torch::nn::Linear(40, 7));
  }
  torch::Tensor forward_by(const torch::Tensor& x, int index) {
    auto y = torch::tanh(shared(x));
    y = y + torch::tanh(experts[static_cast<size_t>(index % 2)](y));
    if (index >= 3) y = y + torch::tanh(experts[2](y));
    return last(y);
  }
  torch::nn::Linear shared{nullptr}, last{nullptr};
  std::vector<torch::nn::Linear> experts;
};
TORCH_MODULE(Experts);

template <typename Module>
torch::Tensor outputs_of(DistributedDataParallel<Module>& model, const Samples& samples, int) {
  return model(samples.inputs);
}
template <>
torch::Tensor outputs_of(DistributedDataParallel<Experts>& model, const Samples& samples,
                         int index) {
  return model->forward_by(samples.inputs, index);
}

struct Trained {
  std::vector<torch::Tensor> parameters;
  std::vector<double> norms;
  std::vector<double> clipped;
};

struct Split {
  int ranks;
  int micro_steps;
};

template <typename Module>
Trained train_split(const Split& split, const Options& options, std::optional<double> clip_norm) {
  Trained trained;
  run_ranks(split.ranks, [&](comm::World& world) {
    DistributedDataParallel<Module> model(make_seeded<Module>(), world, options);
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    Accumulator accumulator(model, {.micro_steps = split.micro_steps, .clip_norm = clip_norm});
    Trained own;
    for (int step = 0; step < 3; ++step) {
      for (int micro = 0; micro < split.micro_steps; ++micro) {
        const int index = micro * world.size() + world.rank();
        const Samples samples = samples_of(index, step);
        const torch::Tensor outputs = outputs_of(model, samples, index);
        accumulator.backward(loss_of(outputs.to(torch::kFloat), samples));
      }
      const StepReport report = accumulator.step(optimizer);
      own.norms.push_back(report.norm);
      own.clipped.push_back(report.clipped_norm);
    }
    own.parameters = copies_of(model.parameters());
    if (world.rank() == 0) trained = own;
  });
  return trained;
}

template <typename Module>
void expect_same_for_all_splits(const std::vector<Split>& splits, Options options,
                                std::optional<double> clip_norm = {}) {
  options.world_invariant = true;
  const Trained expected = train_split<Module>(splits.front(), options, clip_norm);
  for (size_t i = 1; i < splits.size(); ++i) {
    SCOPED_TRACE(c10::str(splits[i].ranks, " ranks and ", splits[i].micro_steps, " micro-steps"));
    const Trained other = train_split<Module>(splits[i], options, clip_norm);
    EXPECT_TRUE(same_bits(expected.parameters, other.parameters));
    EXPECT_EQ(expected.norms, other.norms);
    EXPECT_EQ(expected.clipped, other.clipped);
  }
}

const std::vector<Split> kEight = {{1, 8}, {2, 4}, {4, 2}, {8, 1}};
const std::vector<Split> kSix = {{1, 6}, {2, 3}};

class WorldInvariantTest : public ::testing::TestWithParam<int> {
 protected:
  WorldInvariantTest() { at::set_num_threads(1); }
};

TEST_P(WorldInvariantTest, AnySplitOverRanksAndMicroStepsGivesTheSameBitsAndNorms) {
  expect_same_for_all_splits<Oddball>(kEight, options_of(GetParam()));
  expect_same_for_all_splits<Transformer>(kEight, options_of(GetParam()), 0.05);
  expect_same_for_all_splits<Transformer>(kSix, options_of(GetParam()), 1.0);
}

TEST_P(WorldInvariantTest, AnySplitGivesTheSameBitsInBfloat16) {
  Options options = options_of(GetParam());
  options.compute_dtype = torch::kBFloat16;
  expect_same_for_all_splits<Oddball>(kEight, options, 0.05);
  expect_same_for_all_splits<Oddball>(kSix, options);
}

INSTANTIATE_TEST_SUITE_P(Stages, WorldInvariantTest, ::testing::Values(0, 1, 2, 3));

// At stage 3 all ranks use the same parameters.
TEST(WorldInvariantTest, AnySplitGivesTheSameBitsWhereMicroBatchesUseDifferentParts) {
  for (const int stage : {0, 1, 2}) {
    expect_same_for_all_splits<Experts>(kEight, options_of(stage));
    expect_same_for_all_splits<Experts>(kSix, options_of(stage));
  }
}

TEST(WorldInvariantTest, EveryStageGivesTheSameBits) {
  Options options = options_of(0);
  options.world_invariant = true;
  const Trained expected = train_split<Transformer>({2, 3}, options, {});
  for (const int stage : {1, 2, 3}) {
    options.stage = stage_of(stage);
    EXPECT_TRUE(
        same_bits(expected.parameters, train_split<Transformer>({2, 3}, options, {}).parameters));
  }
}

TEST_P(WorldInvariantTest, AStepInBackwardHasTheSameBits) {
  Options options = options_of(GetParam());
  options.world_invariant = true;
  options.update_by = UpdateBy::kFused;
  options.offload.optimizer = memory::Tier::kHost;
  const Trained expected = train_split<Oddball>({2, 4}, options, {});
  options.offload.step = StepWhen::kInBackward;
  const Trained in_backward = train_split<Oddball>({2, 4}, options, {});
  EXPECT_TRUE(same_bits(expected.parameters, in_backward.parameters));
  EXPECT_EQ(expected.norms, in_backward.norms);
}

// The norm of a step whose gradients were multiplied behind their last micro-batch.
double norm_of_scaled(int stage, double factor) {
  double norm = 0;
  run_ranks(2, [&](comm::World& world) {
    Options options = options_of(stage);
    options.world_invariant = true;
    DistributedDataParallel<Transformer> model(make_seeded<Transformer>(), world, options);
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    Accumulator accumulator(model, {.micro_steps = 3});
    for (int micro_step = 0; micro_step < 3; ++micro_step) {
      const Samples samples = samples_of(world.rank(), micro_step);
      accumulator.backward(loss_of(model(samples.inputs), samples));
    }
    for (const auto& parameter : model.parameters()) {
      if (parameter.grad().defined()) parameter.grad().mul_(factor);
    }
    const double of_step = accumulator.step(optimizer).norm;
    if (world.rank() == 0) norm = of_step;
  });
  return norm;
}

TEST_P(WorldInvariantTest, GradientsAreWholeBehindTheLastMicroBatch) {
  EXPECT_EQ(norm_of_scaled(GetParam(), 0.25), 0.25 * norm_of_scaled(GetParam(), 1));
  EXPECT_EQ(norm_of_scaled(GetParam(), 0), 0);
}

TEST_P(WorldInvariantTest, ALookBetweenMicroBatchesIsRefused) {
  run_ranks(1, [&](comm::World& world) {
    Options options = options_of(GetParam());
    options.world_invariant = true;
    DistributedDataParallel<Oddball> model(make_seeded<Oddball>(), world, options);
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    Accumulator accumulator(model, {.micro_steps = 3});
    const auto run = [&](int micro_step) {
      const Samples samples = samples_of(world.rank(), micro_step);
      accumulator.backward(loss_of(model(samples.inputs), samples));
    };
    const auto gradient = [&] { return model.parameters().front().grad(); };
    run(0);
    EXPECT_GT(gradient().norm().item<double>(), 0);
    run(1);
    EXPECT_THAT(testing::error_of([&] { gradient().mul_(2); }),
                HasSubstr("p.grad() between the micro-batches of a step is of the last one alone"));
    run(2);
    EXPECT_GT(gradient().norm().item<double>(), 0);
    accumulator.step(optimizer);
  });
}

// So the test above would see a sum in another order.
TEST(WorldInvariantTest, WithoutItSplitsDiffer) {
  const Trained one = train_split<Transformer>({1, 8}, options_of(0), {});
  const Trained eight = train_split<Transformer>({8, 1}, options_of(0), {});
  EXPECT_FALSE(same_bits(one.parameters, eight.parameters));
}

std::string error_of(int ranks, const RankFunction& fn) {
  return message_of(try_ranks(ranks, fn).front());
}

TEST(WorldInvariantTest, RefusesWhatWouldDependOnTheSplit) {
  Options options = options_of(2);
  options.world_invariant = true;
  EXPECT_THAT(error_of(3,
                       [&](comm::World& world) {
                         DistributedDataParallel<Oddball> model(make_seeded<Oddball>(), world,
                                                                options);
                       }),
              HasSubstr("options.world_invariant: expected a power of two of ranks, got 3"));
  EXPECT_THAT(error_of(2,
                       [&](comm::World& world) {
                         DistributedDataParallel<Oddball> model(make_seeded<Oddball>(), world,
                                                                options);
                         Accumulator accumulator(
                             model, {.micro_steps = 2, .reduce = ReduceMicroSteps::kOnce});
                       }),
              HasSubstr("kOnce adds up a rank's micro-steps before the ranks', but "
                        "Options::world_invariant adds up the ranks' first"));
  EXPECT_THAT(error_of(2,
                       [&](comm::World& world) {
                         DistributedDataParallel<Oddball> model(make_seeded<Oddball>(), world,
                                                                options);
                         const NoSync guard = model.no_sync();
                       }),
              HasSubstr("no_sync(): adds up this rank's micro-batches before the ranks'"));
  options.reduce_dtype = torch::kBFloat16;
  EXPECT_THAT(error_of(2,
                       [&](comm::World& world) {
                         DistributedDataParallel<Oddball> model(make_seeded<Oddball>(), world,
                                                                options);
                       }),
              HasSubstr("options.world_invariant: sums in fp32"));
}

// ---- the mean over tokens ----

// A regression on single tokens: sample i of a rank's micro-batch.
struct Tokens {
  torch::Tensor inputs;   // [tokens, 7]
  torch::Tensor targets;  // [tokens, 7]
};

Tokens tokens_of(int index, int64_t tokens) {
  const Samples samples = samples_of(index, 0, std::max<int64_t>(tokens, 1));
  return {samples.inputs.narrow(0, 0, tokens), samples.targets.narrow(0, 0, tokens)};
}

// By rank and micro-step; of no tokens the mean is NaN.
const std::vector<std::vector<int64_t>> kUneven = {{2, 0, 7, 1}, {600, 300, 0, 100}};

TEST(TokenWeightsTest, AreTheMeanOverAllTokensOfAllRanks) {
  at::set_num_threads(1);
  Oddball reference = make_seeded<Oddball>();
  {
    std::vector<torch::Tensor> inputs, targets;
    for (size_t rank = 0; rank < 2; ++rank) {
      for (size_t micro = 0; micro < 4; ++micro) {
        const Tokens tokens = tokens_of(static_cast<int>(micro * 2 + rank), kUneven[rank][micro]);
        inputs.push_back(tokens.inputs);
        targets.push_back(tokens.targets);
      }
    }
    SGD optimizer(distinct_parameters(reference), SGDOptions(0.5));
    torch::mse_loss(reference->forward(torch::cat(inputs)), torch::cat(targets)).backward();
    optimizer.step();
  }
  const auto before = make_seeded<Oddball>()->parameters();
  for (const int stage : {0, 1, 2, 3}) {
    for (const auto reduce : {ReduceMicroSteps::kEach, ReduceMicroSteps::kOnce}) {
      run_ranks(2, [&](comm::World& world) {
        DistributedDataParallel<Oddball> model(make_seeded<Oddball>(), world, options_of(stage));
        Optimizer<SGD> optimizer(model, SGDOptions(0.5));
        Accumulator accumulator(model, {.micro_steps = 4, .reduce = reduce});
        double loss = 0;
        const auto& counts = kUneven[static_cast<size_t>(world.rank())];
        for (int micro = 0; micro < 4; ++micro) {
          const auto count = counts[static_cast<size_t>(micro)];
          const Tokens tokens = tokens_of(micro * 2 + world.rank(), count);
          const auto mean = torch::mse_loss(model(tokens.inputs), tokens.targets);
          EXPECT_EQ(count == 0, std::isnan(mean.item<double>()));
          if (count > 0) loss += mean.item<double>() * static_cast<double>(count);
          accumulator.backward(mean, static_cast<double>(count));
        }
        const StepReport report = accumulator.step(optimizer);
        EXPECT_TRUE(report.stepped()) << report.to_string();
        EXPECT_EQ(report.weight, 1010);
        EXPECT_NEAR(accumulator.loss().item<double>(), loss / (world.rank() == 0 ? 10 : 1000),
                    1e-12);
        const auto expected = reference->parameters();
        const auto actual = model.parameters();
        for (size_t i = 0; i < expected.size(); ++i) {
          if (expected[i].numel() == 0) continue;
          EXPECT_LE((expected[i] - actual[i]).abs().max().item<double>(), 1e-6)
              << "parameter " << i << ", stage " << stage;
          const bool trains = expected[i].grad().defined();
          EXPECT_EQ(trains, !torch::equal(expected[i], before[i])) << "parameter " << i;
        }
      });
    }
  }
}

// ---- what it is given ----

template <typename Fn>
std::string message_thrown_by(const Fn& fn) {
  try {
    fn();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "nothing was thrown";
}

TEST(AccumulatorTest, GuardsTheGradientsOfAnOpenStep) {
  run_ranks(2, [](comm::World& world) {
    DistributedDataParallel<Oddball> model(make_seeded<Oddball>(), world, options_of(2));
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    Accumulator accumulator(model, {.micro_steps = 2});
    Accumulator other(model, {.micro_steps = 2});
    const auto loss = [&] { return loss_of(model(samples_of(0, 0).inputs), samples_of(0, 0)); };
    accumulator.backward(loss());
    EXPECT_THAT(message_thrown_by([&] { optimizer.step(); }),
                HasSubstr("step() in the middle of an accumulation"));
    EXPECT_THAT(message_thrown_by([&] { clip_grad_norm_(model, 1); }),
                HasSubstr("step() in the middle of an accumulation"));
    EXPECT_THAT(message_thrown_by([&] { accumulator.step(optimizer); }),
                HasSubstr("accumulator.step(): expected 2 micro-batches, got 1"));
    EXPECT_THAT(message_thrown_by([&] { accumulator.set_micro_steps(3); }),
                HasSubstr("set it between steps"));
    EXPECT_THAT(message_thrown_by([&] { other.backward(loss()); }),
                HasSubstr("another accumulator of this model is in the middle of a step"));
    accumulator.backward(loss());
    EXPECT_THAT(message_thrown_by([&] { accumulator.backward(loss()); }),
                HasSubstr("expected step() after 2 micro-batches, got backward() number 3"));
    EXPECT_TRUE(accumulator.step(optimizer).stepped());
    for (const auto& parameter : model.parameters()) EXPECT_FALSE(parameter.grad().defined());
    loss().backward();
    EXPECT_THAT(message_thrown_by([&] { accumulator.backward(loss()); }),
                HasSubstr("from a backward() of your own; call zero_grad() first"));
  });
}

// Trains by `steps` full steps after `before` has done something with the accumulator.
template <typename Before>
std::vector<torch::Tensor> trained_after(int stage, ReduceMicroSteps reduce, int ranks,
                                         const Before& before) {
  std::vector<torch::Tensor> result;
  run_ranks(ranks, [&](comm::World& world) {
    DistributedDataParallel<Oddball> model(make_seeded<Oddball>(), world, options_of(stage));
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    Accumulator accumulator(model, {.micro_steps = 3, .reduce = reduce});
    accumulated_step(model, accumulator, optimizer, 0);
    before(model, accumulator);
    for (int step = 1; step < 3; ++step) accumulated_step(model, accumulator, optimizer, step);
    const auto parameters = copies_of(model.parameters());
    if (world.rank() == 0) result = parameters;
  });
  return result;
}

// The parameters with an even index in the module, or the others.
std::vector<torch::Tensor> every_second(const std::vector<torch::Tensor>& parameters,
                                        size_t first) {
  std::vector<torch::Tensor> result;
  for (size_t i = first; i < parameters.size(); i += 2) result.push_back(parameters[i]);
  return result;
}

TEST(AccumulatorTest, StepsSeveralOptimizersByOneMean) {
  for (const int stage : {0, 1, 2, 3}) {
    for (const bool world_invariant : {false, true}) {
      Options options = options_of(stage);
      options.world_invariant = world_invariant;
      run_ranks(2, [&](comm::World& world) {
        DistributedDataParallel<Transformer> one(make_seeded<Transformer>(), world, options);
        DistributedDataParallel<Transformer> two(make_seeded<Transformer>(), world, options);
        const AccumulatorOptions accumulation{.micro_steps = 3, .clip_norm = 0.1};
        Accumulator of_one(one, accumulation);
        Accumulator of_two(two, accumulation);
        Optimizer<AdamW> whole(one, AdamWOptions(0.01));
        using Groups = std::vector<torch::optim::OptimizerParamGroup>;
        Optimizer<AdamW> even(two, Groups{every_second(two.parameters(), 0)}, AdamWOptions(0.01));
        Optimizer<AdamW> odd(two, Groups{every_second(two.parameters(), 1)}, AdamWOptions(0.01));
        for (int step = 0; step < 3; ++step) {
          const StepReport expected = accumulated_step(one, of_one, whole, step);
          EXPECT_LT(expected.clipped_norm, expected.norm);
          for (int micro = 0; micro < 3; ++micro) {
            const Samples samples = samples_of(micro * 2 + world.rank(), step);
            of_two.backward(loss_of(two(samples.inputs), samples));
          }
          const StepReport report = of_two.step(even, odd);
          EXPECT_EQ(report.norm, expected.norm);
        }
        EXPECT_TRUE(same_bits(copies_of(one.parameters()), two.parameters())) << "stage " << stage;
      });
    }
  }
}

TEST(AccumulatorTest, RefusesAnOptimizerThatWouldStepByTheSum) {
  run_ranks(1, [](comm::World& world) {
    DistributedDataParallel<Oddball> model(make_seeded<Oddball>(), world, options_of(0));
    DistributedDataParallel<Oddball> other(make_seeded<Oddball>(), world, options_of(0));
    Accumulator accumulator(model, {.micro_steps = 2});
    AdamW plain(distinct_parameters(model.module()), AdamWOptions(0.01));
    Optimizer<AdamW> of_other(other, AdamWOptions(0.01));
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    for (int micro = 0; micro < 2; ++micro) {
      accumulator.backward(loss_of(model(samples_of(micro, 0).inputs), samples_of(micro, 0)));
    }
    const auto before = copies_of(model.parameters());
    EXPECT_THAT(message_thrown_by([&] { accumulator.step(plain); }),
                HasSubstr("accumulator.step(): expected a zeropage::Optimizer of the accumulator's "
                          "model, got another class"));
    EXPECT_THAT(message_thrown_by([&] { accumulator.step(of_other); }),
                HasSubstr("got one of another model"));
    EXPECT_TRUE(same_bits(before, model.parameters()));
    EXPECT_TRUE(accumulator.step(optimizer).stepped());
  });
}

TEST(AccumulatorTest, LeavesBackwardsOfTheUsersOwnAsTheyAre) {
  run_ranks(2, [](comm::World& world) {
    DistributedDataParallel<Oddball> model(make_seeded<Oddball>(), world, options_of(2));
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    Accumulator accumulator(model);
    const Samples samples = samples_of(world.rank(), 0);
    const auto backward = [&] { loss_of(model(samples.inputs), samples).backward(); };
    backward();
    const double norm = gradient_norm(model).total;
    EXPECT_GT(norm, 0);
    model.zero_grad();
    accumulator.backward(loss_of(model(samples.inputs), samples), /*weight=*/0);
    EXPECT_FALSE(accumulator.step(optimizer).stepped());
    backward();
    EXPECT_EQ(gradient_norm(model).total, norm);
  });
}

TEST(AccumulatorTest, MakesAShortStepOfTheMicroBatchesSoFarWhereToldTo) {
  for (const int stage : {0, 1, 2, 3}) {
    for (const auto reduce : {ReduceMicroSteps::kEach, ReduceMicroSteps::kOnce}) {
      run_ranks(2, [&](comm::World& world) {
        DistributedDataParallel<Oddball> model(make_seeded<Oddball>(), world, options_of(stage));
        DistributedDataParallel<Oddball> reference(make_seeded<Oddball>(), world,
                                                   options_of(stage));
        Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
        Optimizer<AdamW> of_reference(reference, AdamWOptions(0.01));
        Accumulator accumulator(
            model, {.micro_steps = 3, .reduce = reduce, .incomplete = IncompleteStep::kWarn});
        Accumulator two(reference, {.micro_steps = 3, .reduce = reduce});
        accumulated_step(model, accumulator, optimizer, 0);
        accumulated_step(reference, two, of_reference, 0);
        for (int micro = 0; micro < 2; ++micro) {
          const Samples samples = samples_of(micro * 2 + world.rank(), 1);
          accumulator.backward(loss_of(model(samples.inputs), samples));
        }
        EXPECT_EQ(accumulator.step(optimizer).weight, 4);
        two.set_micro_steps(2);
        EXPECT_EQ(accumulated_step(reference, two, of_reference, 1).weight, 4);
        EXPECT_TRUE(same_bits(copies_of(reference.parameters()), model.parameters()));
      });
    }
  }
}

TEST(AccumulatorTest, ChangesNoBitByThePowerOfTwoThatScalesTheLoss) {
  for (const bool low : {false, true}) {
    for (const int stage : {0, 3}) {
      Options options = options_of(stage);
      if (low) options.compute_dtype = torch::kBFloat16;
      std::vector<std::vector<torch::Tensor>> trained;
      for (const double scale : {1.0, 4096.0}) {
        run_ranks(2, [&](comm::World& world) {
          DistributedDataParallel<Transformer> model(make_seeded<Transformer>(), world, options);
          Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
          Accumulator accumulator(
              model,
              {.micro_steps = 3, .loss_scaler = accumulate::LossScalerOptions::fixed(scale)});
          for (int step = 0; step < 2; ++step) {
            EXPECT_EQ(accumulated_step(model, accumulator, optimizer, step).loss_scale, scale);
          }
          const auto parameters = copies_of(model.parameters());
          if (world.rank() == 0) trained.push_back(parameters);
        });
      }
      EXPECT_TRUE(same_bits(trained[0], trained[1])) << "stage " << stage;
    }
  }
}

class AbandonTest : public ::testing::TestWithParam<std::tuple<int, ReduceMicroSteps>> {};

TEST_P(AbandonTest, LeavesNoTraceOfTheMicroBatchesBefore) {
  const auto [stage, reduce] = GetParam();
  const auto nothing = [](auto&, auto&) {};
  for (const int ranks : {1, 2}) {
    const auto expected = trained_after(stage, reduce, ranks, nothing);
    const auto one_backward = [](auto& model, auto& accumulator) {
      const Samples samples = samples_of(7, 7);
      accumulator.backward(loss_of(model(samples.inputs), samples));
      accumulator.backward(loss_of(model(samples.inputs), samples));
      accumulator.abandon();
      EXPECT_EQ(accumulator.micro_step(), 0);
    };
    EXPECT_TRUE(same_bits(expected, trained_after(stage, reduce, ranks, one_backward)));
  }
}

// On all ranks alike: the gradients of the last layers are there when the first layer's throws.
TEST_P(AbandonTest, LeavesNoTraceOfABackwardThatThrewBeforeAnythingWasExchanged) {
  const auto [stage, reduce] = GetParam();
  for (const int ranks : {1, 2}) {
    const auto expected = trained_after(stage, reduce, ranks, [](auto&, auto&) {});
    for (const int good : {0, 1, 2}) {
      const auto throws = [&](auto& model, auto& accumulator) {
        const Samples samples = samples_of(7, 7);
        for (int micro = 0; micro < good; ++micro) {
          accumulator.backward(loss_of(model(samples.inputs), samples));
        }
        const unsigned hook =
            model->first->weight.register_hook([](const torch::Tensor&) -> torch::Tensor {
              throw std::runtime_error("the hook's error");
            });
        EXPECT_THROW(accumulator.backward(loss_of(model(samples.inputs), samples)),
                     std::runtime_error);
        model->first->weight.remove_hook(hook);
        accumulator.abandon();
      };
      EXPECT_TRUE(same_bits(expected, trained_after(stage, reduce, ranks, throws)))
          << good << " micro-batches before it, " << ranks << " ranks";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(StagesPolicies, AbandonTest,
                         ::testing::Combine(::testing::Values(0, 1, 2, 3),
                                            ::testing::Values(ReduceMicroSteps::kEach,
                                                              ReduceMicroSteps::kOnce)));

}  // namespace
}  // namespace zeropage::accumulation_test
