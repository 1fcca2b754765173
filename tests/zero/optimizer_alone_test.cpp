// An Optimizer without a wrapper, over a plain module: what a script does ends in the bits of the same script with the module
// wrapped.
#include <functional>
#include <map>
#include <mutex>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "tests/harness/reference.h"
#include "tests/harness/state_files.h"
#include "tests/harness/tiny_models.h"
#include "zeropage/optimizer.h"
#include "zeropage/zeropage.h"

namespace zeropage::optimizer_alone_test {
namespace {

using namespace zeropage::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGD;
using torch::optim::SGDOptions;

using Values = std::vector<torch::Tensor>;

template <typename M>
M seeded() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  torch::manual_seed(3);
  return M();
}

// What trains later does not when the optimizer is made.
struct HalfFrozenImpl : TransformerImpl {
  HalfFrozenImpl() {
    for (auto& parameter : blocks->parameters()) parameter.requires_grad_(false);
  }
};
TORCH_MODULE(HalfFrozen);

// Each parameter once, weights decayed and the rest not.
template <typename M>
ShardedOptimizer::Groups groups_of(const M& net) {
  Values decayed, others;
  for (const torch::Tensor& parameter : distinct_parameters(net)) {
    (parameter.dim() > 1 ? decayed : others).push_back(parameter);
  }
  const AdamWOptions options(0.01);
  ShardedOptimizer::Groups groups;
  groups.emplace_back(decayed,
                      std::make_unique<AdamWOptions>(AdamWOptions(options).weight_decay(0.1)));
  groups.emplace_back(others,
                      std::make_unique<AdamWOptions>(AdamWOptions(options).weight_decay(0)));
  return groups;
}

template <typename M>
class Wrapped {
 public:
  Wrapped(World& world, const Options& options)
      : net(seeded<M>()),
        world(world),
        model(net, world, options),
        optimizer(model, groups_of(net), AdamWOptions(0.01)) {}

  torch::Tensor forward(const torch::Tensor& x) { return model(x); }
  ModelRef ref() const { return model; }
  TrainedModule trained() const { return model; }
  auto no_sync() { return std::make_unique<NoSync>(model.no_sync()); }

  M net;
  World& world;
  DistributedDataParallel<M> model;
  Optimizer<AdamW> optimizer;
};

template <typename M>
class Alone {
 public:
  Alone(World& world, const Options& options)
      : net(seeded<M>()),
        world(world),
        optimizer(groups_of(net), world, AdamWOptions(0.01), options) {}

  torch::Tensor forward(const torch::Tensor& x) { return net->forward(x); }
  ModelRef ref() const { return optimizer; }
  TrainedModule trained() const { return net; }
  auto no_sync() { return std::make_unique<NoSync>(optimizer.no_sync()); }

  M net;
  World& world;
  Optimizer<AdamW> optimizer;
};

template <typename Side>
torch::Tensor loss_of_step(Side& side, int step, int64_t batch = 3) {
  const Samples samples = samples_of(side.world.rank(), step, batch);
  return loss_of(side.forward(samples.inputs), samples);
}

template <typename Side>
Values parameters_of(Side& side) {
  Values values;
  for (const auto& parameter : side.net->parameters()) values.push_back(parameter.detach().clone());
  return values;
}

// Three steps, each zero_grad(), backward(step), whatever that does more, and step().
template <typename Side, typename Backward>
Values train(Side& side, const Backward& backward, int first = 0, int end = 3) {
  for (int step = first; step < end; ++step) {
    side.optimizer.zero_grad();
    backward(step);
    side.optimizer.step();
  }
  return parameters_of(side);
}

class OptimizerAloneTest : public ::testing::TestWithParam<int> {
 protected:
  OptimizerAloneTest() { at::set_num_threads(1); }

  Options options() const {
    Options options;
    options.stage = stage_of(GetParam());
    options.page_bytes = 4096;
    return options;
  }

  template <typename Side, typename Script>
  std::vector<Values> by_rank(int ranks, const Script& script) const {
    std::vector<Values> values(static_cast<size_t>(ranks));
    run_ranks(ranks, [&](World& world) {
      Side side(world, options());
      values[static_cast<size_t>(world.rank())] = script(side);
    });
    return values;
  }

  // script: Values(auto& side).
  template <typename M = Transformer, typename Script>
  void expect_bits_of_wrapper(const Script& script) const {
    for (const int ranks : {2, 3}) {
      SCOPED_TRACE(::testing::Message() << ranks << " ranks");
      const auto expected = by_rank<Wrapped<M>>(ranks, script);
      const auto actual = by_rank<Alone<M>>(ranks, script);
      for (size_t rank = 0; rank < expected.size(); ++rank) {
        EXPECT_TRUE(same_bits(expected[rank], actual[rank])) << "rank " << rank;
        EXPECT_TRUE(same_bits(expected[0], actual[rank])) << "rank " << rank << " and rank 0";
      }
    }
  }
};

TEST_P(OptimizerAloneTest, ClipsTheNormOfTheMeanByEitherFunction) {
  for (const bool by_libtorch : {true, false}) {
    expect_bits_of_wrapper([&](auto& side) {
      Values norms;
      Values values = train(side, [&](int step) {
        loss_of_step(side, step).backward();
        const double norm =
            by_libtorch ? torch::nn::utils::clip_grad_norm_(distinct_parameters(side.net), 0.2)
                        : clip_grad_norm_(side.ref(), 0.2).before;
        norms.push_back(torch::tensor(norm, torch::kDouble));
      });
      values.insert(values.end(), norms.begin(), norms.end());
      return values;
    });
  }
}

TEST_P(OptimizerAloneTest, ClipsValuesOfTheMeanByEitherFunction) {
  for (const bool by_libtorch : {true, false}) {
    expect_bits_of_wrapper([&](auto& side) {
      return train(side, [&](int step) {
        loss_of_step(side, step).backward();
        if (by_libtorch) {
          torch::nn::utils::clip_grad_value_(distinct_parameters(side.net), 0.01);
        } else {
          clip_grad_value_(side.ref(), 0.01);
        }
      });
    });
  }
}

// What a loop over the whole batch in one process has.
TEST_P(OptimizerAloneTest, HasTheNormAndLossOfOneProcessWithTheWholeBatch) {
  auto whole = seeded<Transformer>();
  AdamW reference(groups_of(whole), AdamWOptions(0.01));
  std::vector<double> norms;
  for (int step = 0; step < 3; ++step) {
    reference.zero_grad();
    for (int rank = 0; rank < 2; ++rank) {
      const Samples samples = samples_of(rank, step);
      (loss_of(whole->forward(samples.inputs), samples) / 2).backward();
    }
    norms.push_back(torch::nn::utils::clip_grad_norm_(whole->parameters(), 0.2));
    reference.step();
  }
  run_ranks(2, [&](World& world) {
    Alone<Transformer> side(world, options());
    train(side, [&](int step) {
      loss_of_step(side, step).backward();
      EXPECT_NEAR(gradient_norm(side.optimizer).total, norms[static_cast<size_t>(step)], 1e-3);
      EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(side.net->parameters(), 0.2),
                  norms[static_cast<size_t>(step)], 1e-3);
    });
  });
}

TEST_P(OptimizerAloneTest, ReadsAndChangesTheMeanByHand) {
  expect_bits_of_wrapper([](auto& side) {
    return train(side, [&](int step) {
      loss_of_step(side, step).backward();
      torch::Tensor squares = torch::zeros({});
      for (const auto& parameter : distinct_parameters(side.net)) {
        squares += parameter.grad().pow(2).sum();
      }
      for (auto parameter : distinct_parameters(side.net)) {
        parameter.mutable_grad() = parameter.grad() / (1 + squares.sqrt());
        parameter.mutable_grad().mul_(0.5).add_(0.001);
      }
    });
  });
}

TEST_P(OptimizerAloneTest, AddsUpGradientsOfRepeatedBackwards) {
  for (const bool in_one_reduction : {false, true}) {
    expect_bits_of_wrapper([&](auto& side) {
      return train(side, [&](int step) {
        for (int micro = 0; micro < 3; ++micro) {
          const auto guard = in_one_reduction && micro < 2 ? side.no_sync() : nullptr;
          (loss_of_step(side, 10 * step + micro) / 3).backward();
        }
        torch::nn::utils::clip_grad_norm_(distinct_parameters(side.net), 0.2);
      });
    });
  }
}

TEST_P(OptimizerAloneTest, AccumulatesClipsScalesAndSkipsByAnAccumulator) {
  expect_bits_of_wrapper([](auto& side) {
    Accumulator accumulator(side.ref(), {.micro_steps = 2,
                                         .clip_norm = 0.3,
                                         .loss_scaler = LossScalerOptions{.initial_scale = 256}});
    Values reports;
    for (int step = 0; step < 4; ++step) {
      for (int micro = 0; micro < 2; ++micro) {
        torch::Tensor loss = loss_of_step(side, 10 * step + micro, 2 + micro);
        // One rank's, of one micro-batch.
        if (step == 1 && micro == 0 && side.world.rank() == 1) loss = loss / 0;
        accumulator.backward(loss, 2 + micro);
      }
      const StepReport report = accumulator.step(side.optimizer);
      EXPECT_EQ(report.stepped(), step != 1);
      if (report.stepped()) {
        reports.push_back(torch::tensor(
            {report.norm, report.clipped_norm, report.weight, report.loss_scale}, torch::kDouble));
      }
    }
    for (const torch::Tensor& value : parameters_of(side)) reports.push_back(value);
    return reports;
  });
}

TEST_P(OptimizerAloneTest, GivesTheMeanToWhoLooksBehindTheLastMicroBatch) {
  expect_bits_of_wrapper([](auto& side) {
    Accumulator accumulator(side.ref(), {.micro_steps = 2});
    for (int step = 0; step < 3; ++step) {
      accumulator.backward(loss_of_step(side, 10 * step));
      accumulator.backward(loss_of_step(side, 10 * step + 1));
      torch::nn::utils::clip_grad_norm_(distinct_parameters(side.net), 0.2);
      accumulator.step(side.optimizer);
    }
    return parameters_of(side);
  });
}

TEST_P(OptimizerAloneTest, ObeysASchedulerAndAClosure) {
  expect_bits_of_wrapper([](auto& side) {
    torch::optim::StepLR scheduler(side.optimizer, 1, 0.5);
    for (int step = 0; step < 3; ++step) {
      side.optimizer.step([&] {
        side.optimizer.zero_grad(/*set_to_none=*/false);
        const torch::Tensor loss = loss_of_step(side, step);
        loss.backward();
        return loss;
      });
      scheduler.step();
    }
    return parameters_of(side);
  });
}

// The first step with them, too: a script clips what it sees behind backward.
TEST_P(OptimizerAloneTest, TakesInParametersThatAreUnfrozen) {
  expect_bits_of_wrapper<Oddball>([](auto& side) {
    return train(
        side,
        [&](int step) {
          for (auto& parameter : side.net->frozen->parameters()) {
            parameter.requires_grad_(step >= 2);
          }
          loss_of_step(side, step).backward();
          torch::nn::utils::clip_grad_norm_(distinct_parameters(side.net), 0.2);
        },
        0, 4);
  });
}

TEST_P(OptimizerAloneTest, TakesInParametersThatAreUnfrozenBetweenTheStepsOfAnAccumulator) {
  expect_bits_of_wrapper<Oddball>([](auto& side) {
    Accumulator accumulator(side.ref(), {.micro_steps = 2, .clip_norm = 0.2});
    for (int step = 0; step < 4; ++step) {
      for (auto& parameter : side.net->frozen->parameters()) parameter.requires_grad_(step >= 2);
      accumulator.backward(loss_of_step(side, 10 * step));
      accumulator.backward(loss_of_step(side, 10 * step + 1));
      accumulator.step(side.optimizer);
    }
    return parameters_of(side);
  });
}

// What is unfrozen is another part than what trained before: no parameter that has a gradient had one then.
TEST_P(OptimizerAloneTest, TakesInParametersThatAreUnfrozenWhereTheOthersAreFrozen) {
  expect_bits_of_wrapper<HalfFrozen>([](auto& side) {
    return train(
        side,
        [&](int step) {
          auto blocks = side.net->blocks->parameters();
          for (auto& parameter : side.net->parameters()) parameter.requires_grad_(step < 2);
          for (auto& parameter : blocks) parameter.requires_grad_(step >= 2);
          loss_of_step(side, step).backward();
          torch::nn::utils::clip_grad_norm_(distinct_parameters(side.net), 0.2);
        },
        0, 4);
  });
}

TEST_P(OptimizerAloneTest, UpdatesMasterWeightsOfAModuleInBf16) {
  expect_bits_of_wrapper([this](auto& side) {
    using Side = std::decay_t<decltype(side)>;
    auto net = seeded<Transformer>();
    net->to(torch::kBFloat16);
    std::unique_ptr<DistributedDataParallel<Transformer>> model;
    std::unique_ptr<Optimizer<AdamW>> optimizer;
    if constexpr (std::is_same_v<Side, Wrapped<Transformer>>) {
      model = std::make_unique<DistributedDataParallel<Transformer>>(net, side.world, options());
      optimizer = std::make_unique<Optimizer<AdamW>>(*model, AdamWOptions(0.01));
    } else {
      optimizer = std::make_unique<Optimizer<AdamW>>(net->parameters(), side.world,
                                                     AdamWOptions(0.01), options());
    }
    for (int step = 0; step < 3; ++step) {
      const Samples samples = samples_of(side.world.rank(), step);
      optimizer->zero_grad();
      torch::mse_loss(net->forward(samples.inputs.to(torch::kBFloat16)).to(torch::kFloat),
                      samples.targets)
          .backward();
      torch::nn::utils::clip_grad_norm_(net->parameters(), 0.2);
      optimizer->step();
    }
    Values values;
    for (const auto& parameter : net->parameters()) values.push_back(parameter.detach().clone());
    return values;
  });
}

TEST_P(OptimizerAloneTest, RepeatsCheckpointedForwards) {
  expect_bits_of_wrapper([](auto& side) {
    return train(side, [&](int step) {
      const Samples samples = samples_of(side.world.rank(), step);
      const torch::Tensor outputs =
          checkpoint([&side](const torch::Tensor& x) { return side.forward(x); },
                     samples.inputs.clone().requires_grad_());
      loss_of(outputs, samples).backward();
      torch::nn::utils::clip_grad_norm_(distinct_parameters(side.net), 0.2);
    });
  });
}

TEST_P(OptimizerAloneTest, EvaluatesWithTheAverageOfItsWeights) {
  expect_bits_of_wrapper<ConvNet>([](auto& side) {
    WeightAverage average(side.ref(), {.decay = 0.75});
    for (int step = 0; step < 3; ++step) {
      side.optimizer.zero_grad();
      loss_of_step(side, step).backward();
      side.optimizer.step();
      average.update();
    }
    const torch::NoGradGuard no_grad;
    average.swap_in();
    Values values = parameters_of(side);
    average.swap_out();
    for (const torch::Tensor& value : parameters_of(side)) values.push_back(value);
    visit_owned_shards(side.ref(), [&](const OwnedShard& shard) {
      EXPECT_TRUE(torch::equal(shard.values, shard.exact)) << shard.name;
    });
    return values;
  });
}

// ---- states on disk ----

class OptimizerAloneStateTest : public OptimizerAloneTest {
 protected:
  template <typename Side>
  static void some_steps(Side& side, WeightAverage& average, int first, int end) {
    for (int step = first; step < end; ++step) {
      side.optimizer.zero_grad();
      loss_of_step(side, step).backward();
      torch::nn::utils::clip_grad_norm_(distinct_parameters(side.net), 0.2);
      side.optimizer.step();
      average.update();
    }
  }

  std::filesystem::path path(const std::string& name) const {
    return std::filesystem::path(folder_.path()) / name;
  }

  template <typename Side>
  void save(const std::string& name, int steps = 2) const {
    run_ranks(2, [&](World& world) {
      Side side(world, options());
      WeightAverage average(side.ref(), {.decay = 0.75});
      some_steps(side, average, 0, steps);
      save_state(path(name), side.trained(), side.optimizer, {.step = steps, .average = &average});
    });
  }

 private:
  const DiskFolder folder_;
};

TEST_P(OptimizerAloneStateTest, SavesTheBytesOfTheWrapper) {
  save<Wrapped<ConvNet>>("wrapped");
  save<Alone<ConvNet>>("alone");
  const auto expected = files_of(path("wrapped")), actual = files_of(path("alone"));
  ASSERT_EQ(expected.size(), 3U);
  size_t compared = 0;
  for (const auto& [name, bytes] : expected) {
    if (!name.ends_with(".safetensors")) continue;
    EXPECT_TRUE(actual.at(name) == bytes) << name;
    ++compared;
  }
  EXPECT_EQ(compared, 2U);
}

// The states of either are the other's, on another number of ranks.
TEST_P(OptimizerAloneStateTest, ResumesStatesOfEitherOnAnotherNumberOfRanks) {
  save<Wrapped<ConvNet>>("wrapped");
  save<Alone<ConvNet>>("alone");
  std::vector<Values> results;
  const auto resume = [&](auto tag, const std::string& from) {
    using Side = typename decltype(tag)::type;
    Values values;
    run_ranks(3, [&](World& world) {
      Side side(world, options());
      WeightAverage average(side.ref(), {.decay = 0.75});
      RunState run{.average = &average};
      const LoadReport report = load_state(path(from), side.trained(), side.optimizer, run);
      EXPECT_EQ(run.step, 2);
      EXPECT_TRUE(report.missing.empty() && report.unexpected.empty());
      EXPECT_EQ(side.optimizer.steps(), 2);
      some_steps(side, average, 2, 5);
      average.swap_in();
      Values averaged = parameters_of(side);
      average.swap_out();
      if (world.rank() != 0) return;
      values = parameters_of(side);
      values.insert(values.end(), averaged.begin(), averaged.end());
    });
    results.push_back(values);
  };
  for (const std::string from : {"wrapped", "alone"}) {
    resume(std::type_identity<Wrapped<ConvNet>>(), from);
    resume(std::type_identity<Alone<ConvNet>>(), from);
  }
  for (const Values& values : results) EXPECT_TRUE(same_bits(results.front(), values));
}

TEST_P(OptimizerAloneStateTest, GoesOnWithTheBitsOfARunThatWasNotStopped) {
  Values expected, actual;
  run_ranks(2, [&](World& world) {
    Alone<Transformer> side(world, options());
    WeightAverage average(side.optimizer, {.decay = 0.75});
    some_steps(side, average, 0, 5);
    if (world.rank() == 0) expected = parameters_of(side);
  });
  run_ranks(2, [&](World& world) {
    Alone<Transformer> side(world, options());
    WeightAverage average(side.optimizer, {.decay = 0.75});
    check_can_save(path("run"), side.net, side.optimizer);
    StateSaver saver(path("run"), world, {.keep_last = 2});
    for (int step = 0; step < 3; ++step) {
      some_steps(side, average, step, step + 1);
      saver.save(side.net, side.optimizer, {.step = step + 1, .average = &average});
    }
    saver.wait();
  });
  run_ranks(2, [&](World& world) {
    Alone<Transformer> side(world, options());
    WeightAverage average(side.optimizer, {.decay = 0.75});
    RunState run{.average = &average};
    load_state(path("run"), side.net, side.optimizer, run);
    EXPECT_EQ(run.step, 3);
    some_steps(side, average, 3, 5);
    if (world.rank() == 0) actual = parameters_of(side);
  });
  EXPECT_TRUE(same_bits(expected, actual));
}

TEST_P(OptimizerAloneStateTest, BringsWeightsInAndOut) {
  Values saved;
  run_ranks(2, [&](World& world) {
    Alone<ConvNet> side(world, options());
    train(side, [&](int step) { loss_of_step(side, step).backward(); });
    save_weights(path("weights"), side.net, side.optimizer, {}, {.weights_as = WeightsAs::kFp32});
    if (world.rank() == 0) saved = parameters_of(side);
  });
  run_ranks(3, [&](World& world) {
    Alone<ConvNet> by_optimizer(world, options());
    load_weights(path("weights"), by_optimizer.net, by_optimizer.optimizer);
    EXPECT_TRUE(same_bits(saved, parameters_of(by_optimizer)));
    // Weights are loaded into the plain module, and the pages follow.
    Alone<ConvNet> plain(world, options());
    load_weights(path("weights"), plain.net);
    const auto step = [&](auto& side) {
      return train(
          side, [&](int at) { loss_of_step(side, at).backward(); }, 3, 4);
    };
    EXPECT_TRUE(same_bits(step(by_optimizer), step(plain)));
  });
}

// What the optimizer was not given is the module's still.
TEST_P(OptimizerAloneStateTest, SavesParametersThatTheOptimizerWasNotGiven) {
  const auto make = [&](World& world, const auto& use) {
    auto net = seeded<Oddball>();
    Values trained;
    for (const auto& parameter : distinct_parameters(net)) {
      if (parameter.requires_grad()) trained.push_back(parameter);
    }
    Optimizer<AdamW> optimizer(trained, world, AdamWOptions(0.01), options());
    use(net, optimizer);
  };
  run_ranks(2, [&](World& world) {
    make(world, [&](auto& net, auto& optimizer) {
      const torch::NoGradGuard no_grad;
      net->frozen->weight.fill_(7);
      net->first->weight.fill_(8);
      save_state(path("state"), net, optimizer);
    });
  });
  run_ranks(3, [&](World& world) {
    make(world, [&](auto& net, auto& optimizer) {
      load_state(path("state"), net, optimizer);
      EXPECT_TRUE(net->frozen->weight.eq(7).all().template item<bool>());
      EXPECT_TRUE(net->first->weight.eq(8).all().template item<bool>());
    });
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, OptimizerAloneTest, ::testing::Values(0, 1));
INSTANTIATE_TEST_SUITE_P(Stages, OptimizerAloneStateTest, ::testing::Values(0, 1));

// ---- what is refused ----

Options of_stage(int stage) {
  Options options;
  options.stage = stage_of(stage);
  return options;
}

TEST(OptimizerAloneErrorTest, NamesTheCallOfARankThatLooksAtGradientsAlone) {
  const auto errors = try_ranks(2, [](World& world) {
    Alone<Transformer> side(world, of_stage(1));
    loss_of_step(side, 0).backward();
    if (world.rank() == 1) side.net->norm->weight.grad().norm();
    side.optimizer.step();
  });
  EXPECT_THAT(message_of(errors[0]), HasSubstr("which an operator on p.grad() gathers"));
  EXPECT_THAT(message_of(errors[1]), HasSubstr("which an operator on p.grad() gathers"));
}

TEST(OptimizerAloneErrorTest, NamesWhatSavesItsState) {
  run_ranks(1, [](World& world) {
    Alone<Transformer> side(world, of_stage(1));
    std::ostringstream out;
    EXPECT_THAT(error_of([&] { torch::save(side.optimizer, out); }),
                AllOf(HasSubstr("zeropage::save_state(directory, module, optimizer)"),
                      HasSubstr("the plain module that the optimizer alone steps")));
  });
}

TEST(OptimizerAloneErrorTest, RefusesAStateOfAnotherModuleOrOptimizer) {
  run_ranks(1, [](World& world) {
    Alone<Transformer> side(world, of_stage(1));
    auto other = seeded<Transformer>();
    EXPECT_THAT(
        error_of([&] { save_state("state", other, side.optimizer); }),
        HasSubstr("the optimizer's parameter 0 is no parameter of the module that was given"));
    auto net = seeded<Oddball>();
    Optimizer<SGD> first(net->first->parameters(), world, SGDOptions(0.1));
    Optimizer<SGD> last(net->last->parameters(), world, SGDOptions(0.1));
    EXPECT_THAT(error_of([&] { save_state("state", net, first); }),
                AllOf(HasSubstr(
                    "parameter \"tied\" of the module is stepped by another zeropage::Optimizer")));
    DistributedDataParallel<Transformer> model(other, world);
    Optimizer<SGD> of_model(model, SGDOptions(0.1));
    EXPECT_THAT(error_of([&] { save_state("state", other, of_model); }),
                HasSubstr("give the DistributedDataParallel in place of the module"));
  });
}

// The advice of the first works.
TEST(OptimizerAloneErrorTest, TakesAPlainFileUnderTheGuardThatTheErrorNames) {
  run_ranks(2, [](World& world) {
    auto source = seeded<Transformer>();
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : source->parameters()) parameter.fill_(0.125);
    }
    std::stringstream file;
    torch::save(source, file);
    Alone<Transformer> side(world, of_stage(1));
    {
      const GatheredParameters guard(side.optimizer, Modified::on_every_rank());
      torch::load(side.net, file);
    }
    for (const auto& parameter : side.net->parameters()) {
      EXPECT_TRUE(parameter.eq(0.125).all().item<bool>());
    }
    loss_of_step(side, 0).backward();
    side.optimizer.step();
    // And out again, as before.
    std::stringstream out;
    torch::save(side.net, out);
    auto loaded = seeded<Transformer>();
    torch::load(loaded, out);
    EXPECT_TRUE(same_bits(parameters_of(side), loaded->parameters()));
    Alone<Transformer> bare(world, of_stage(1));
    std::stringstream again(file.str());
    torch::load(bare.net, again);
    loss_of_step(bare, 0).backward();
    EXPECT_THAT(error_of([&] { bare.optimizer.step(); }),
                HasSubstr("zeropage::GatheredParameters"));
  });
}

}  // namespace
}  // namespace zeropage::optimizer_alone_test
