#include "zeropage/accumulator.h"

#include <array>
#include <functional>
#include <optional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/schedulers/step_lr.h>

#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "tests/harness/reference.h"
#include "tests/harness/tiny_models.h"
#include "zero/late_report.h"
#include "zero/setup/sharded_model.h"
#include "zeropage/zeropage.h"

namespace zeropage::accumulator_test {
namespace {

using namespace zeropage::testing;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGD;
using torch::optim::SGDOptions;

using Linear = DistributedDataParallel<torch::nn::Linear>;

torch::nn::Linear make_linear() {
  torch::nn::Linear linear(7, 7);
  const torch::NoGradGuard no_grad;
  for (auto& parameter : linear->parameters()) parameter.fill_(1.0);
  return linear;
}

// Its gradient is `slope` in every weight, and in the bias 1 / 7 for each sample.
torch::Tensor loss_with_slope(Linear& model, double slope) {
  return model(torch::full({1, 7}, slope)).sum();
}

double weight_of(Linear& model) {
  return model->weight.detach().to(torch::kFloat)[2][3].item<double>();
}

OptimizerParamGroup group(std::vector<torch::Tensor> parameters) {
  return OptimizerParamGroup(std::move(parameters));
}

// What was warned of on this thread while it lives.
class Warnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { words_.push_back(warning.msg()); }
  const std::vector<std::string>& words() const { return words_; }

 private:
  std::vector<std::string> words_;
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};

class AccumulatorTest : public ::testing::TestWithParam<int> {
 protected:
  Options options() const {
    Options options;
    options.stage = stage_of(GetParam());
    return options;
  }
};

// ---- the mean ----

TEST_P(AccumulatorTest, StepsWithTheMeanOverMicroBatchesAndRanks) {
  for (const ReduceMicroSteps reduce : {ReduceMicroSteps::kEach, ReduceMicroSteps::kOnce}) {
    run_ranks(2, [&](comm::World& world) {
      Linear model(make_linear(), world, options());
      Optimizer<SGD> optimizer(model, SGDOptions(1.0));
      Accumulator accumulator(model, {.micro_steps = 3, .reduce = reduce});
      for (int step = 0; step < 2; ++step) {
        for (int micro = 0; micro < 3; ++micro) {
          EXPECT_EQ(accumulator.micro_step(), micro);
          // 0 1 2 and 3 4 5: the mean is 2.5.
          accumulator.backward(loss_with_slope(model, 3 * world.rank() + micro));
        }
        const StepReport report = accumulator.step(optimizer);
        EXPECT_EQ(accumulator.micro_step(), 0);
        EXPECT_DOUBLE_EQ(weight_of(model), 1 - 2.5 * (step + 1));
        EXPECT_EQ(report.weight, 6);
        // 49 weights of 2.5 and 7 biases of 1.
        EXPECT_NEAR(report.norm, std::sqrt(49 * 2.5 * 2.5 + 7), 1e-6);
        EXPECT_EQ(report.clipped_norm, report.norm);
        EXPECT_FALSE(model->weight.grad().defined()) << "gradients are zeroed";
      }
    });
  }
}

TEST_P(AccumulatorTest, WeighsMicroBatchesByWhatTheyAreAMeanOver) {
  run_ranks(2, [&](comm::World& world) {
    Linear model(make_linear(), world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    Accumulator accumulator(model, {.micro_steps = 2});
    // (1 * 1 + 3 * 2) and (2 * 4 + 2 * 0), over 8.
    accumulator.backward(loss_with_slope(model, world.rank() == 0 ? 1 : 4),
                         world.rank() == 0 ? 1 : 2);
    accumulator.backward(loss_with_slope(model, world.rank() == 0 ? 2 : 0),
                         world.rank() == 0 ? 3 : 2);
    EXPECT_EQ(accumulator.step(optimizer).weight, 8);
    EXPECT_DOUBLE_EQ(weight_of(model), 1 - 15.0 / 8);
  });
}

TEST_P(AccumulatorTest, ReportsThisRanksMeanLoss) {
  run_ranks(2, [&](comm::World& world) {
    Linear model(make_linear(), world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(0.0));
    Accumulator accumulator(model, {.micro_steps = 2});
    EXPECT_FALSE(accumulator.loss().defined());
    const double own = world.rank() + 1.0;
    // A loss is 49 slopes and 7.
    accumulator.backward(loss_with_slope(model, own), 3);
    EXPECT_DOUBLE_EQ(accumulator.loss().item<double>(), 49 * own + 7);
    accumulator.backward(loss_with_slope(model, 0), 1);
    const double expected = (3 * (49 * own + 7) + 7) / 4;
    EXPECT_DOUBLE_EQ(accumulator.loss().item<double>(), expected);
    accumulator.step(optimizer);
    EXPECT_DOUBLE_EQ(accumulator.loss().item<double>(), expected) << "until the next backward()";
    EXPECT_EQ(accumulator.loss().scalar_type(), torch::kFloat64);
    accumulator.backward(loss_with_slope(model, 5), 0);
    EXPECT_FALSE(accumulator.loss().defined()) << "no micro-batch had weight";
  });
}

TEST_P(AccumulatorTest, TakesNothingFromAMicroBatchWithoutWeight) {
  for (const ReduceMicroSteps reduce : {ReduceMicroSteps::kEach, ReduceMicroSteps::kOnce}) {
    run_ranks(2, [&](comm::World& world) {
      Linear model(make_linear(), world, options());
      Optimizer<SGD> optimizer(model, SGDOptions(1.0));
      Accumulator accumulator(model, {.micro_steps = 2, .reduce = reduce});
      const bool has_one = world.rank() == 0;
      accumulator.backward(loss_with_slope(model, has_one ? 3 : NAN), has_one ? 1 : 0);
      accumulator.backward(loss_with_slope(model, INFINITY), 0);
      EXPECT_TRUE(accumulator.step(optimizer).stepped());
      EXPECT_DOUBLE_EQ(weight_of(model), -2.0);
    });
  }
}

TEST_P(AccumulatorTest, LeavesAParameterAloneThatOnlyMicroBatchesWithoutWeightUsed) {
  run_ranks(2, [&](comm::World& world) {
    Linear model(make_linear(), world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0).weight_decay(0.5));
    Accumulator accumulator(model, {.micro_steps = 2});
    accumulator.backward(model->weight.sum());
    accumulator.backward(model->bias.sum(), 0);
    accumulator.step(optimizer);
    EXPECT_DOUBLE_EQ(weight_of(model), -0.5) << "stepped and decayed";
    EXPECT_TRUE(model->bias.eq(1).all().item<bool>()) << "without a gradient nothing decays";
  });
}

TEST_P(AccumulatorTest, MakesNoStepWhereNoMicroBatchHasWeight) {
  run_ranks(2, [&](comm::World& world) {
    Linear model(make_linear(), world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0).weight_decay(0.5));
    Accumulator accumulator(model);
    accumulator.backward(loss_with_slope(model, 3), 0);
    const StepReport report = accumulator.step(optimizer);
    EXPECT_EQ(report.skipped, Skipped::kNoWeight);
    EXPECT_EQ(report.to_string(), "skipped: no micro-batch of any rank had weight");
    EXPECT_DOUBLE_EQ(weight_of(model), 1.0);
    accumulator.backward(loss_with_slope(model, 1));
    EXPECT_TRUE(accumulator.step(optimizer).stepped());
  });
}

TEST_P(AccumulatorTest, GivesTheBitsOfOneBackwardWhereThereIsOneMicroBatch) {
  run_ranks(2, [&](comm::World& world) {
    const auto make = [] {
      static std::mutex mutex;
      const std::lock_guard lock(mutex);
      torch::manual_seed(5);
      return Oddball();
    };
    DistributedDataParallel<Oddball> plain(make(), world, options());
    Optimizer<AdamW> plain_optimizer(plain, AdamWOptions(0.01));
    DistributedDataParallel<Oddball> model(make(), world, options());
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    Accumulator accumulator(model);
    for (int step = 0; step < 3; ++step) {
      const Samples samples = samples_of(world.rank(), step);
      plain_optimizer.zero_grad();
      loss_of(plain(samples.inputs), samples).backward();
      plain_optimizer.step();
      accumulator.backward(loss_of(model(samples.inputs), samples));
      accumulator.step(optimizer);
    }
    const auto expected = full_state(plain);
    const auto actual = full_state(model);
    EXPECT_TRUE(same_bits(expected.values(), actual.values()));
  });
}

// ---- mistakes ----

TEST_P(AccumulatorTest, RefusesLossesAndWeightsThatAreNone) {
  run_ranks(2, [&](comm::World& world) {
    Linear model(make_linear(), world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    Accumulator accumulator(model);
    const auto refusal = [&](const torch::Tensor& loss, double weight = 1) {
      return error_of([&] { accumulator.backward(loss, weight); });
    };
    EXPECT_THAT(refusal({}), HasSubstr("requires grad, got an undefined tensor"));
    EXPECT_THAT(refusal(model(torch::ones({1, 7}))), HasSubstr("got sizes [1, 7]"));
    EXPECT_THAT(refusal(torch::ones({})), HasSubstr("got sizes [] without requires_grad"));
    for (const double weight : {-1.0, -0.5, double{NAN}, double{INFINITY}}) {
      EXPECT_THAT(refusal(loss_with_slope(model, 1), weight),
                  HasSubstr("expected a finite weight of 0 or more, got "))
          << weight;
    }
    EXPECT_EQ(accumulator.micro_step(), 0) << "none was begun";
    accumulator.backward(loss_with_slope(model, 1));
    accumulator.step(optimizer);
    EXPECT_DOUBLE_EQ(weight_of(model), 0.0);
  });
}

TEST_P(AccumulatorTest, RefusesMoreMicroBatchesThanItWasMadeFor) {
  run_ranks(2, [&](comm::World& world) {
    Linear model(make_linear(), world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    Accumulator accumulator(model, {.micro_steps = 2});
    accumulator.backward(loss_with_slope(model, 1));
    accumulator.backward(loss_with_slope(model, 1));
    EXPECT_THAT(error_of([&] { accumulator.backward(loss_with_slope(model, 1)); }),
                HasSubstr("expected step() after 2 micro-batches, got backward() number 3; raise "
                          "micro_steps, or step"));
    accumulator.step(optimizer);
    EXPECT_DOUBLE_EQ(weight_of(model), 0.0) << "the third left nothing behind";
  });
}

TEST_P(AccumulatorTest, RefusesToStepBeforeTheLastMicroBatch) {
  run_ranks(2, [&](comm::World& world) {
    Linear model(make_linear(), world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    Accumulator accumulator(model, {.micro_steps = 2});
    EXPECT_THAT(error_of([&] { accumulator.step(optimizer); }),
                HasSubstr("accumulator.step(): expected 2 micro-batches, got 0; call backward()"));
    accumulator.backward(loss_with_slope(model, 1));
    EXPECT_THAT(error_of([&] { accumulator.step(optimizer); }),
                HasSubstr("expected 2 micro-batches, got 1; call backward() for the others"));
    EXPECT_DOUBLE_EQ(weight_of(model), 1.0);
    accumulator.backward(loss_with_slope(model, 3));
    accumulator.step(optimizer);
    EXPECT_DOUBLE_EQ(weight_of(model), -1.0) << "the refusal lost nothing";
  });
}

TEST_P(AccumulatorTest, WarnsAndMakesTheMeanOfWhatThereIsWhereToldTo) {
  for (const ReduceMicroSteps reduce : {ReduceMicroSteps::kEach, ReduceMicroSteps::kOnce}) {
    run_ranks(2, [&](comm::World& world) {
      Linear model(make_linear(), world, options());
      Optimizer<SGD> optimizer(model, SGDOptions(1.0));
      Accumulator accumulator(
          model, {.micro_steps = 3, .reduce = reduce, .incomplete = IncompleteStep::kWarn});
      EXPECT_THAT(error_of([&] { accumulator.step(optimizer); }), HasSubstr("got 0;"))
          << "there is no mean of nothing";
      accumulator.backward(loss_with_slope(model, 1 + world.rank()));
      accumulator.backward(loss_with_slope(model, 2 + world.rank()));
      const Warnings warnings;
      accumulator.step(optimizer);
      EXPECT_THAT(warnings.words(),
                  ::testing::ElementsAre(HasSubstr("expected 3 micro-batches, got 2; this step is "
                                                   "the mean of those")));
      EXPECT_DOUBLE_EQ(weight_of(model), -1.0);
    });
  }
}

TEST_P(AccumulatorTest, RefusesOtherStepsInTheMiddleAndLeavesTheWeights) {
  for (const ReduceMicroSteps reduce : {ReduceMicroSteps::kEach, ReduceMicroSteps::kOnce}) {
    run_ranks(2, [&](comm::World& world) {
      Linear model(make_linear(), world, options());
      Optimizer<SGD> optimizer(model, SGDOptions(1.0));
      Accumulator accumulator(model, {.micro_steps = 2, .reduce = reduce});
      accumulator.backward(loss_with_slope(model, 1));
      EXPECT_THAT(error_of([&] { optimizer.step(); }),
                  AllOf(HasSubstr("step() in the middle of an accumulation"),
                        HasSubstr("accumulator.abandon()")));
      EXPECT_DOUBLE_EQ(weight_of(model), 1.0);
      accumulator.backward(loss_with_slope(model, 2));
      EXPECT_THAT(error_of([&] { optimizer.step(); }), HasSubstr("in the middle")) << "still sums";
      EXPECT_DOUBLE_EQ(weight_of(model), 1.0);
      accumulator.step(optimizer);
      EXPECT_DOUBLE_EQ(weight_of(model), -0.5);
    });
  }
}

TEST_P(AccumulatorTest, RefusesGradientsThatAreLeftFromBefore) {
  run_ranks(2, [&](comm::World& world) {
    Linear model(make_linear(), world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    Accumulator accumulator(model);
    loss_with_slope(model, 9).backward();
    EXPECT_THAT(error_of([&] { accumulator.backward(loss_with_slope(model, 1)); }),
                HasSubstr("parameter \"weight\" has a gradient before the first micro-batch"));
    model.zero_grad();
    accumulator.backward(loss_with_slope(model, 1));
    accumulator.step(optimizer);
    EXPECT_DOUBLE_EQ(weight_of(model), 0.0);
  });
}

TEST_P(AccumulatorTest, ChangesTheNumberOfMicroStepsBetweenStepsOnly) {
  run_ranks(2, [&](comm::World& world) {
    Linear model(make_linear(), world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    Accumulator accumulator(model, {.micro_steps = 2});
    accumulator.backward(loss_with_slope(model, 1));
    EXPECT_THAT(error_of([&] { accumulator.set_micro_steps(1); }),
                HasSubstr("1 micro-batches of a step are there already; set it between steps"));
    accumulator.backward(loss_with_slope(model, 1));
    accumulator.step(optimizer);
    EXPECT_THAT(error_of([&] { accumulator.set_micro_steps(0); }),
                HasSubstr("expected 1 or more, got 0"));
    accumulator.set_micro_steps(1);
    EXPECT_EQ(accumulator.micro_steps(), 1);
    accumulator.backward(loss_with_slope(model, 2));
    accumulator.step(optimizer);
    EXPECT_DOUBLE_EQ(weight_of(model), -2.0);
  });
}

TEST_P(AccumulatorTest, RefusesAnotherAccumulatorInTheMiddleOfAStep) {
  run_ranks(2, [&](comm::World& world) {
    Linear model(make_linear(), world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    Accumulator accumulator(model, {.micro_steps = 2});
    {
      Accumulator other(model);
      accumulator.backward(loss_with_slope(model, 1));
      EXPECT_THAT(error_of([&] { other.backward(loss_with_slope(model, 1)); }),
                  HasSubstr("another accumulator of this model is in the middle of a step"));
      EXPECT_EQ(other.micro_step(), 0);
      other.abandon();
    }
    // Whose end, without a micro-batch of its own, dropped nothing.
    accumulator.backward(loss_with_slope(model, 3));
    accumulator.step(optimizer);
    EXPECT_DOUBLE_EQ(weight_of(model), -1.0);
    Accumulator next(model);
    next.backward(loss_with_slope(model, 1));
    next.step(optimizer);
    EXPECT_DOUBLE_EQ(weight_of(model), -2.0);
  });
}

TEST_P(AccumulatorTest, RefusesOptimizersThatDoNotKnowTheFactor) {
  run_ranks(2, [&](comm::World& world) {
    Linear model(make_linear(), world, options());
    Linear other(make_linear(), world, options());
    Accumulator accumulator(model);
    accumulator.backward(loss_with_slope(model, 1));
    SGD plain(model.parameters(), SGDOptions(1.0));
    EXPECT_THAT(error_of([&] { accumulator.step(plain); }),
                HasSubstr("expected a zeropage::Optimizer of the accumulator's model"));
    Optimizer<SGD> of_other(other, SGDOptions(1.0));
    EXPECT_THAT(error_of([&] { accumulator.step(of_other); }),
                HasSubstr("expected a zeropage::Optimizer of the accumulator's model"));
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    accumulator.step(optimizer);
    EXPECT_DOUBLE_EQ(weight_of(model), 0.0);
  });
}

// ---- the end of an accumulation without a step ----

TEST_P(AccumulatorTest, AbandonsWhatWasAccumulated) {
  for (const ReduceMicroSteps reduce : {ReduceMicroSteps::kEach, ReduceMicroSteps::kOnce}) {
    run_ranks(2, [&](comm::World& world) {
      Linear model(make_linear(), world, options());
      Optimizer<SGD> optimizer(model, SGDOptions(1.0));
      Accumulator accumulator(model, {.micro_steps = 3, .reduce = reduce});
      accumulator.backward(loss_with_slope(model, 100));
      accumulator.backward(loss_with_slope(model, 100), 5);
      accumulator.abandon();
      EXPECT_EQ(accumulator.micro_step(), 0);
      EXPECT_FALSE(model->weight.grad().defined());
      for (int micro = 0; micro < 3; ++micro) accumulator.backward(loss_with_slope(model, micro));
      EXPECT_EQ(accumulator.step(optimizer).weight, 6);
      EXPECT_DOUBLE_EQ(weight_of(model), 0.0);
    });
  }
}

TEST_P(AccumulatorTest, DropsOpenGradientsWhenItGoes) {
  for (const ReduceMicroSteps reduce : {ReduceMicroSteps::kEach, ReduceMicroSteps::kOnce}) {
    run_ranks(2, [&](comm::World& world) {
      Linear model(make_linear(), world, options());
      Optimizer<SGD> optimizer(model, SGDOptions(1.0));
      {
        Accumulator accumulator(model, {.micro_steps = 2, .reduce = reduce});
        accumulator.backward(loss_with_slope(model, 100));
      }
      EXPECT_FALSE(model->weight.grad().defined());
      // Averaged again, not summed.
      loss_with_slope(model, world.rank()).backward();
      optimizer.step();
      EXPECT_DOUBLE_EQ(weight_of(model), 0.5);
    });
  }
}

// A module of two layers whose backward reaches the second layer, and then throws.
struct TwoLayers {
  torch::nn::Sequential net{torch::nn::Linear(7, 7), torch::nn::Linear(7, 7)};

  TwoLayers() {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) parameter.fill_(1.0);
  }
  torch::Tensor loss_that_throws() {
    auto hidden = net[0]->as<torch::nn::Linear>()->forward(torch::full({1, 7}, 100.0));
    hidden.register_hook(
        [](const torch::Tensor&) -> torch::Tensor { throw std::runtime_error("the user's hook"); });
    return net[1]->as<torch::nn::Linear>()->forward(hidden).sum();
  }
};

TEST_P(AccumulatorTest, GoesOnAfterABackwardThatThrewAndWasAbandoned) {
  for (const ReduceMicroSteps reduce : {ReduceMicroSteps::kEach, ReduceMicroSteps::kOnce}) {
    for (const int before : {0, 1}) {
      run_ranks(2, [&](comm::World& world) {
        const auto train = [&](bool throws) {
          TwoLayers layers;
          DistributedDataParallel<torch::nn::Sequential> model(layers.net, world, options());
          Optimizer<SGD> optimizer(model, SGDOptions(0.125));
          Accumulator accumulator(model, {.micro_steps = 2, .reduce = reduce});
          if (throws) {
            for (int micro = 0; micro < before; ++micro) {
              accumulator.backward(model(torch::full({1, 7}, 50.0)).sum());
            }
            EXPECT_THAT(error_of([&] { accumulator.backward(layers.loss_that_throws()); }),
                        HasSubstr("the user's hook"));
            EXPECT_THAT(error_of([&] { accumulator.step(optimizer); }),
                        ::testing::AnyOf(HasSubstr("ended by an exception"),
                                         HasSubstr("expected 2 micro-batches")));
            if (before == 0) {
              EXPECT_THAT(error_of([&] {
                            accumulator.backward(model(torch::full({1, 7}, 1.0)).sum());
                          }),
                          AllOf(HasSubstr("the micro-batch before ended by an exception"),
                                HasSubstr("call accumulator.abandon() on all ranks")));
            }
            accumulator.abandon();
          }
          for (int micro = 0; micro < 2; ++micro) {
            accumulator.backward(model(torch::full({1, 7}, 1.0 + micro)).sum());
          }
          EXPECT_TRUE(accumulator.step(optimizer).stepped());
          return full_state(model, world.rank());
        };
        const auto expected = train(false);
        EXPECT_TRUE(same_bits(expected.values(), train(true).values()))
            << before << " micro-batches before, reduce " << static_cast<int>(reduce);
      });
    }
  }
}

TEST_P(AccumulatorTest, LeavesPlainTrainingRightAfterABackwardThatThrewAndWasAbandoned) {
  run_ranks(2, [&](comm::World& world) {
    TwoLayers layers;
    DistributedDataParallel<torch::nn::Sequential> model(layers.net, world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    Accumulator accumulator(model, {.micro_steps = 2});
    accumulator.backward(model(torch::full({1, 7}, 50.0)).sum());
    EXPECT_NE(error_of([&] { accumulator.backward(layers.loss_that_throws()); }), "");
    accumulator.abandon();
    EXPECT_THAT(error_of([&] { optimizer.step(); }), HasSubstr("ended by an exception"));
    model.zero_grad();
    model(torch::full({1, 7}, 1.0)).sum().backward();
    optimizer.step();
    // The last layer's inputs were 8.
    EXPECT_TRUE(layers.net[1]->as<torch::nn::Linear>()->weight.eq(-7).all().item<bool>());
  });
}

// ---- clipping, spikes, scales ----

TEST_P(AccumulatorTest, ClipsTheNormOfTheMean) {
  run_ranks(2, [&](comm::World& world) {
    Linear model(make_linear(), world, options());
    Optimizer<SGD> optimizer(model, {group({model->weight})}, SGDOptions(1.0));
    Accumulator accumulator(model, {.micro_steps = 2, .clip_norm = 3.5});
    const auto step = [&](double slope) {
      for (int micro = 0; micro < 2; ++micro) accumulator.backward(model->weight.sum() * slope);
      return accumulator.step(optimizer);
    };
    StepReport report = step(2);  // norm 14
    EXPECT_NEAR(report.norm, 14, 1e-6);
    EXPECT_NEAR(report.clipped_norm, 3.5, 1e-5);
    EXPECT_EQ(report.to_string(),
              c10::str("stepped, norm ", report.norm, " clipped to ", report.clipped_norm));
    EXPECT_NEAR(weight_of(model), 0.5, 1e-6);
    report = step(0.25);
    EXPECT_EQ(report.clipped_norm, report.norm);
    EXPECT_EQ(report.to_string(), "stepped, norm 1.75");
    EXPECT_NEAR(weight_of(model), 0.25, 1e-6);
  });
}

TEST_P(AccumulatorTest, ClipsTheElementsOfTheMean) {
  for (const double scale : {1.0, 1024.0}) {
    run_ranks(2, [&](comm::World& world) {
      Linear model(make_linear(), world, options());
      Optimizer<SGD> optimizer(model, SGDOptions(1.0));
      Accumulator accumulator(model, {.micro_steps = 2,
                                      .clip_value = 0.5,
                                      .loss_scaler = accumulate::LossScalerOptions::fixed(scale)});
      for (int micro = 0; micro < 2; ++micro) {
        // The mean is 4 in the weight, in the bias -0.25.
        accumulator.backward(model->weight.sum() * (3 + 2 * world.rank()) -
                             model->bias.sum() * (world.rank() * 0.5));
      }
      const StepReport report = accumulator.step(optimizer);
      EXPECT_DOUBLE_EQ(weight_of(model), 0.5);
      EXPECT_TRUE(model->bias.eq(1.25).all().item<bool>()) << model->bias;
      EXPECT_EQ(report.clipped_norm, report.norm);
      EXPECT_NEAR(report.norm, std::sqrt(49 * 16 + 7.0 / 16), 1e-5);
    });
  }
}

accumulate::NormSpikeOptions judging_after_two(accumulate::OnSpike on_spike) {
  return {.window = 4, .z_score = 3, .warm_up = 2, .on_spike = on_spike};
}

TEST_P(AccumulatorTest, SkipsAStepWhoseNormIsASpikeAndLeavesWeightsAndState) {
  run_ranks(2, [&](comm::World& world) {
    const auto train = [&](bool with_spike) {
      Linear model(make_linear(), world, options());
      Optimizer<AdamW> optimizer(model, AdamWOptions(0.125));
      Accumulator accumulator(model,
                              {.norm_spikes = judging_after_two(accumulate::OnSpike::kSkip)});
      const auto step = [&](double factor) {
        accumulator.backward(loss_with_slope(model, 1) * factor);
        return accumulator.step(optimizer);
      };
      for (int warm = 0; warm < 3; ++warm) EXPECT_TRUE(step(1).stepped());
      if (with_spike) {
        const StepReport report = step(100);
        EXPECT_EQ(report.skipped, Skipped::kNormSpike);
        EXPECT_THAT(report.to_string(), HasSubstr(" is a spike"));
        EXPECT_EQ(accumulator.norm_spikes()->spikes(), 1);
      }
      EXPECT_TRUE(step(1).stepped());
      return full_state(model, world.rank());
    };
    EXPECT_TRUE(same_bits(train(false).values(), train(true).values()));
  });
}

TEST_P(AccumulatorTest, StopsOnAllRanksAtASpikeAndCanGoOn) {
  run_ranks(2, [&](comm::World& world) {
    Linear model(make_linear(), world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(0.125));
    Accumulator accumulator(model, {.norm_spikes = judging_after_two(accumulate::OnSpike::kStop)});
    const auto step = [&](double factor) {
      accumulator.backward(loss_with_slope(model, 1) * factor);
      accumulator.step(optimizer);
    };
    for (int warm = 0; warm < 3; ++warm) step(1);
    const double before = weight_of(model);
    EXPECT_THAT(error_of([&] { step(world.rank() == 0 ? 1 : 100); }), HasSubstr("norm"));
    EXPECT_EQ(weight_of(model), before);
    EXPECT_EQ(accumulator.micro_step(), 0);
    EXPECT_FALSE(model->weight.grad().defined());
    accumulator.abandon();
    step(1);
    EXPECT_DOUBLE_EQ(weight_of(model), before - 0.125);
  });
}

TEST_P(AccumulatorTest, SkipsAStepThatIsNotFiniteOnSomeRankAndBacksOff) {
  run_ranks(3, [&](comm::World& world) {
    Linear model(make_linear(), world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0).weight_decay(0.5).momentum(0.5));
    Accumulator accumulator(
        model,
        {.micro_steps = 2, .loss_scaler = accumulate::LossScalerOptions{.initial_scale = 8}});
    accumulator.backward(loss_with_slope(model, 1));
    accumulator.backward(model->weight.sum() + model->bias.sum() * (world.rank() == 1 ? NAN : 1));
    const StepReport report = accumulator.step(optimizer);
    EXPECT_EQ(report.skipped, Skipped::kNotFinite);
    EXPECT_EQ(report.not_finite, std::vector<std::string>{"bias"});
    EXPECT_EQ(report.loss_scale, 8);
    EXPECT_EQ(report.next_loss_scale, 4);
    EXPECT_EQ(report.to_string(),
              "skipped: the gradient of parameter \"bias\" is not finite; loss scale "
              "8, next 4");
    EXPECT_EQ(accumulator.loss_scaler().scale(), 4);
    EXPECT_TRUE(model->weight.eq(1).all().item<bool>());
    EXPECT_TRUE(model->bias.eq(1).all().item<bool>());
    for (int micro = 0; micro < 2; ++micro) accumulator.backward(loss_with_slope(model, 1));
    const StepReport good = accumulator.step(optimizer);
    EXPECT_TRUE(good.stepped());
    EXPECT_EQ(good.loss_scale, 4);
    EXPECT_TRUE(good.not_finite.empty());
    EXPECT_DOUBLE_EQ(weight_of(model), -0.5) << "nothing of the skipped one is in it";
  });
}

TEST_P(AccumulatorTest, StopsWhereTheLossScaleCannotGoLowerAndLeavesTheWeights) {
  run_ranks(2, [&](comm::World& world) {
    Linear model(make_linear(), world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    Accumulator accumulator(
        model,
        {.loss_scaler = accumulate::LossScalerOptions{
             .initial_scale = 2, .min_scale = 2, .at_minimum = accumulate::AtMinimum::kStop}});
    accumulator.backward(loss_with_slope(model, world.rank() == 1 ? INFINITY : 1));
    EXPECT_THAT(error_of([&] { accumulator.step(optimizer); }), HasSubstr("scale"));
    EXPECT_DOUBLE_EQ(weight_of(model), 1.0);
    EXPECT_EQ(accumulator.micro_step(), 0);
    accumulator.backward(loss_with_slope(model, 1));
    EXPECT_TRUE(accumulator.step(optimizer).stepped());
    EXPECT_DOUBLE_EQ(weight_of(model), 0.0);
  });
}

TEST_P(AccumulatorTest, RefusesALossWhosePrecisionWouldRoundItsWeight) {
  run_ranks(1, [&](comm::World& world) {
    Linear model(make_linear(), world, options());
    Accumulator accumulator(model);
    const auto loss = [&] { return loss_with_slope(model, 1).to(torch::kBFloat16); };
    EXPECT_THAT(error_of([&] { accumulator.backward(loss(), 257); }),
                HasSubstr("a loss in BFloat16 cannot carry its weight 257"));
    accumulator.backward(loss(), 256);
  });
}

TEST_P(AccumulatorTest, RefusesABackwardPastItInTheMiddleOfAStep) {
  run_ranks(2, [&](comm::World& world) {
    Linear model(make_linear(), world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    Accumulator accumulator(model, {.micro_steps = 2});
    accumulator.backward(loss_with_slope(model, 1));
    EXPECT_THAT(error_of([&] { loss_with_slope(model, 1).backward(); }),
                HasSubstr("backward() past the accumulator"));
    accumulator.backward(loss_with_slope(model, 3));
    EXPECT_TRUE(accumulator.step(optimizer).stepped());
    EXPECT_DOUBLE_EQ(weight_of(model), -1);
  });
}

// Whatever kAuto comes to at that stage.
constexpr std::array kPolicies = {ReduceMicroSteps::kAuto, ReduceMicroSteps::kEach,
                                  ReduceMicroSteps::kOnce};

TEST_P(AccumulatorTest, NoticesGradientsThatAreZeroedOrReplacedInTheMiddleOfAStep) {
  using Change = std::function<void(Linear&)>;
  const std::vector<Change> changes = {
      [](Linear& model) { model.zero_grad(); },
      [](Linear& model) { model->bias.mutable_grad().reset(); },
      [](Linear& model) {
        model->weight.mutable_grad() = torch::zeros({7, 7});
      },
      [](Linear& model) { model->weight.mutable_grad() = model->weight.grad().clone(); },
  };
  for (const ReduceMicroSteps reduce : kPolicies) {
    run_ranks(2, [&](comm::World& world) {
      Linear model(make_linear(), world, options());
      Optimizer<SGD> optimizer(model, SGDOptions(1.0));
      Accumulator accumulator(model, {.micro_steps = 3, .reduce = reduce});
      for (const Change& change : changes) {
        accumulator.backward(loss_with_slope(model, 1));
        accumulator.backward(loss_with_slope(model, 1));
        change(model);
        EXPECT_THAT(error_of([&] { accumulator.backward(loss_with_slope(model, 1)); }),
                    AllOf(HasSubstr("zeroed or replaced between two micro-batches"),
                          HasSubstr("leave zero_grad() out")))
            << &change - changes.data();
        accumulator.abandon();
      }
      for (int micro = 0; micro < 3; ++micro) accumulator.backward(loss_with_slope(model, 2));
      EXPECT_EQ(accumulator.step(optimizer).weight, 6) << "what was refused counted nothing";
      EXPECT_DOUBLE_EQ(weight_of(model), -1.0);
    });
  }
}

// A script that does so on all ranks gets the same from either policy.
TEST_P(AccumulatorTest, LetsScriptsMultiplyTheSumInTheMiddleOfAStep) {
  for (const ReduceMicroSteps reduce : kPolicies) {
    run_ranks(2, [&](comm::World& world) {
      Linear model(make_linear(), world, options());
      Optimizer<SGD> optimizer(model, SGDOptions(1.0));
      Accumulator accumulator(model, {.micro_steps = 4, .reduce = reduce});
      const torch::NoGradGuard no_grad;
      for (const double factor : {0.5, 0.0}) {
        const double before = weight_of(model);
        for (int micro = 0; micro < 4; ++micro) {
          const torch::AutoGradMode on(true);
          accumulator.backward(loss_with_slope(model, 1 + world.rank()));
          if (micro == 1) model->weight.mutable_grad().mul_(factor);
        }
        accumulator.step(optimizer);
        EXPECT_DOUBLE_EQ(before - weight_of(model), 1.5 * (2 * factor + 2) / 4);
      }
    });
  }
}

// At stage 3 a forward is collective, so no rank can leave one out.
class AccumulatorOfWholeParametersTest : public AccumulatorTest {};

TEST_P(AccumulatorOfWholeParametersTest, WeighsWhatEachRankHasWhereOneLeavesOutAMicroBatch) {
  run_ranks(2, [&](comm::World& world) {
    Linear model(make_linear(), world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    Accumulator accumulator(
        model,
        {.micro_steps = 3, .reduce = ReduceMicroSteps::kOnce, .incomplete = IncompleteStep::kWarn});
    const Warnings warnings;
    for (int micro = world.rank(); micro < 3; ++micro) {
      accumulator.backward(loss_with_slope(model, 1 + micro));
    }
    EXPECT_EQ(accumulator.step(optimizer).weight, 5);
    EXPECT_NEAR(weight_of(model), 1 - (1 + 2 + 3 + 2 + 3) / 5.0, 1e-6);
    EXPECT_EQ(warnings.words().size(), world.rank() == 0 ? 0U : 1U);
  });
}

TEST_P(AccumulatorTest, IsTheSameAroundAndWithinNoSync) {
  for (const ReduceMicroSteps reduce : kPolicies) {
    run_ranks(2, [&](comm::World& world) {
      Linear model(make_linear(), world, options());
      Optimizer<SGD> optimizer(model, SGDOptions(1.0));
      Accumulator accumulator(model, {.micro_steps = 2, .reduce = reduce});
      {
        const NoSync guard = model.no_sync();
        accumulator.backward(loss_with_slope(model, 1 + world.rank()));
      }
      accumulator.backward(loss_with_slope(model, 1 + world.rank()));
      accumulator.step(optimizer);
      EXPECT_DOUBLE_EQ(weight_of(model), -0.5);
      {
        std::optional<NoSync> guard = model.no_sync();
        accumulator.backward(loss_with_slope(model, 1 + world.rank()));
        accumulator.backward(loss_with_slope(model, 1 + world.rank()));
        accumulator.step(optimizer);
        EXPECT_DOUBLE_EQ(weight_of(model), -2.0);
        loss_with_slope(model, 1 + world.rank()).backward();
        guard.reset();
      }
      loss_with_slope(model, 1 + world.rank()).backward();
      optimizer.step();
      EXPECT_DOUBLE_EQ(weight_of(model), -5.0) << "both of the script's own backwards";
    });
  }
}

TEST_P(AccumulatorTest, ScalesLossesInHalfFromTheStart) {
  run_ranks(2, [&](comm::World& world) {
    Options in_half = options();
    in_half.compute_dtype = torch::kHalf;
    Linear model(make_linear(), world, in_half);
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    Accumulator accumulator(model, {.micro_steps = 2});
    EXPECT_EQ(accumulator.loss_scaler().scale(), 65536);
    // The gradient of a loss in half is 65536 at first, which is infinite there.
    const auto step = [&](torch::ScalarType dtype) {
      for (int micro = 0; micro < 2; ++micro) {
        accumulator.backward(model(torch::full({1, 7}, 1.0 / 1024)).to(dtype).mean());
      }
      return accumulator.step(optimizer);
    };
    EXPECT_TRUE(step(torch::kFloat).stepped());
    const StepReport overflowed = step(torch::kHalf);
    EXPECT_EQ(overflowed.skipped, Skipped::kNotFinite) << overflowed.to_string();
    EXPECT_EQ(overflowed.next_loss_scale, 32768);
    EXPECT_TRUE(step(torch::kHalf).stepped());
    // Two steps of 1/7 in the bias.
    EXPECT_NEAR(model->bias.to(torch::kFloat)[0].item<double>(), 1 - 2.0 / 7, 1e-3);
  });
}

// ---- optimizers ----

TEST_P(AccumulatorTest, StepsSeveralOptimizersAsOne) {
  for (const bool clips_value : {false, true}) {
    run_ranks(2, [&](comm::World& world) {
      const auto train = [&](const auto& make_and_step) {
        Linear model(make_linear(), world, options());
        AccumulatorOptions accumulation{.micro_steps = 2};
        if (clips_value) accumulation.clip_value = 0.01;
        Accumulator accumulator(model, accumulation);
        make_and_step(model, [&](auto&... optimizers) {
          for (int step = 0; step < 3; ++step) {
            for (int micro = 0; micro < 2; ++micro) {
              accumulator.backward(
                  model(samples_of(world.rank(), step + micro).inputs).square().mean(),
                  1 + world.rank());
            }
            EXPECT_TRUE(accumulator.step(optimizers...).stepped());
          }
        });
        return full_state(model, world.rank());
      };
      const auto one = train([](Linear& model, const auto& run) {
        Optimizer<AdamW> optimizer(model, AdamWOptions(0.1));
        run(optimizer);
      });
      const auto two = train([](Linear& model, const auto& run) {
        Optimizer<AdamW> of_bias(model, {group({model->bias})}, AdamWOptions(0.1));
        Optimizer<AdamW> of_weight(model, {group({model->weight})}, AdamWOptions(0.1));
        run(of_weight, of_bias);
      });
      EXPECT_TRUE(same_bits(one.values(), two.values()));
      EXPECT_FALSE(torch::equal(one["bias"], torch::ones({7})));
    });
  }
}

TEST_P(AccumulatorTest, ReducesGradientsOnceForSeveralOptimizers) {
  run_ranks(2, [&](comm::World& world) {
    Linear model(make_linear(), world, options());
    Optimizer<SGD> of_bias(model, {group({model->bias})}, SGDOptions(0.5));
    Optimizer<SGD> of_weight(model, {group({model->weight})}, SGDOptions(0.5));
    Accumulator accumulator(model);
    const auto sent = [&] {
      const comm::WireTraffic traffic = world.communicator().wire_traffic();
      return traffic.all_reduce.bytes + traffic.reduce_scatter.bytes;
    };
    accumulator.backward(loss_with_slope(model, 1));
    const int64_t before = sent();
    accumulator.step(of_weight, of_bias);
    EXPECT_EQ(sent() - before, 0) << "backward() has reduced them";
  });
}

TEST_P(AccumulatorTest, WorksWithSchedulers) {
  run_ranks(2, [&](comm::World& world) {
    Linear model(make_linear(), world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    torch::optim::StepLR scheduler(optimizer, /*step_size=*/1, /*gamma=*/0.5);
    scheduler.step();  // LibTorch's StepLR counts its first call as the beginning.
    Accumulator accumulator(model, {.micro_steps = 2});
    double expected = 1;
    for (const double rate : {1.0, 0.5, 0.25}) {
      for (int micro = 0; micro < 2; ++micro) accumulator.backward(loss_with_slope(model, 1));
      accumulator.step(optimizer);
      scheduler.step();
      expected -= rate;
      EXPECT_DOUBLE_EQ(weight_of(model), expected);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, AccumulatorTest, ::testing::Values(0, 1, 2, 3));
INSTANTIATE_TEST_SUITE_P(Stages, AccumulatorOfWholeParametersTest, ::testing::Values(0, 1, 2));

// ---- options ----

TEST(AccumulatorOptionsTest, AreRefusedOutOfRange) {
  run_ranks(1, [](comm::World& world) {
    Linear model(make_linear(), world);
    const auto refusal = [&](const AccumulatorOptions& options) {
      return error_of([&] { Accumulator accumulator(model, options); });
    };
    EXPECT_THAT(refusal({.micro_steps = 0}), HasSubstr("micro_steps: expected 1 or more, got 0"));
    EXPECT_THAT(refusal({.micro_steps = -4}), HasSubstr("micro_steps: expected 1 or more, got -4"));
    EXPECT_THAT(refusal({.gradient_budget_bytes = -1}), HasSubstr("gradient_budget_bytes"));
    for (const double bad : {0.0, -1.0, double{NAN}}) {
      EXPECT_THAT(refusal({.clip_norm = bad}), HasSubstr("clip_norm: expected a norm above 0"));
      EXPECT_THAT(refusal({.clip_value = bad}), HasSubstr("clip_value: expected a value above 0"));
    }
    EXPECT_THAT(refusal({.clip_norm = 1, .clip_value = 1}),
                HasSubstr("clip_norm and clip_value are both set"));
    EXPECT_THAT(refusal({.loss_scaler = accumulate::LossScalerOptions{.initial_scale = 3}}),
                HasSubstr("power of two"));
    EXPECT_THAT(refusal({.norm_spikes = accumulate::NormSpikeOptions{.window = 1}}),
                HasSubstr("window"));
    EXPECT_EQ(refusal({}), "");
  });
}

TEST(AccumulatorOptionsTest, ThatDifferBetweenRanksAreNamed) {
  const auto words = [](const AccumulatorOptions& first, const AccumulatorOptions& second) {
    const auto errors = try_ranks(2, [&](comm::World& world) {
      Options sharded;
      sharded.stage = Stage::kGradients;
      Linear model(make_linear(), world, sharded);
      Accumulator accumulator(model, world.rank() == 0 ? first : second);
    });
    EXPECT_EQ(message_of(errors[0]).empty(), message_of(errors[1]).empty());
    return message_of(errors[1]);
  };
  EXPECT_THAT(words({.micro_steps = 2}, {.micro_steps = 3}),
              HasSubstr("rank 0 has micro_steps: 2; rank 1 has micro_steps: 3"));
  EXPECT_THAT(words({.reduce = ReduceMicroSteps::kOnce}, {}),
              HasSubstr("rank 0 has reduce: once; rank 1 has reduce: each"));
  EXPECT_THAT(words({.gradient_budget_bytes = 1 << 20}, {}), HasSubstr("reduce: once"));
  EXPECT_THAT(words({.incomplete = IncompleteStep::kWarn}, {}), HasSubstr("incomplete: "));
  EXPECT_THAT(words({.clip_norm = 1}, {}),
              HasSubstr("rank 0 has clip_norm: 1; rank 1 has clip_norm: none"));
  EXPECT_THAT(words({.clip_value = 1}, {.clip_value = 2}), HasSubstr("clip_value: 2"));
  EXPECT_THAT(words({.loss_scaler = accumulate::LossScalerOptions::fixed(8)}, {}),
              HasSubstr("loss_scaler.initial_scale: 8"));
  EXPECT_THAT(words({.norm_spikes = accumulate::NormSpikeOptions()}, {}),
              HasSubstr("norm_spikes.window: 128"));
  EXPECT_EQ(words({.micro_steps = 2}, {.micro_steps = 2}), "");
}

// "each: " or "once: ", and why.
std::string reduction_of(Linear& model, const AccumulatorOptions& options) {
  const MicroStepReduction reduction = Accumulator(model, options).reduction();
  return (reduction.when == ReduceMicroSteps::kEach ? "each: " : "once: ") + reduction.why;
}

TEST(AccumulatorOptionsTest, ReduceOnceWhereGradientsAreWholeAnyway) {
  run_ranks(2, [](comm::World& world) {
    for (const int stage : {0, 1}) {
      for (const memory::Tier tier : {memory::Tier::kDevice, memory::Tier::kHost}) {
        Options options;
        options.stage = stage_of(stage);
        options.offload.optimizer = tier;
        Linear model(make_linear(), world, options);
        EXPECT_EQ(reduction_of(model, {}), "once: each rank has whole gradients at this stage");
        EXPECT_EQ(reduction_of(model, {.gradient_budget_bytes = 1}),
                  "once: each rank has whole gradients at this stage");
        EXPECT_EQ(reduction_of(model, {.reduce = ReduceMicroSteps::kEach}),
                  "each: AccumulatorOptions::reduce asks for it");
      }
    }
    Options half;
    half.compute_dtype = half.reduce_dtype = torch::kHalf;
    Linear model(make_linear(), world, half);
    EXPECT_EQ(Accumulator(model, {.micro_steps = 2}).reduction().to_string(),
              "once a step: each rank has whole gradients at this stage");
  });
}

TEST(AccumulatorOptionsTest, ReduceOnceWithoutAWrapper) {
  run_ranks(2, [](comm::World& world) {
    torch::nn::Linear linear = make_linear();
    for (const int stage : {0, 1}) {
      Options options;
      options.stage = stage_of(stage);
      Optimizer<SGD> optimizer(linear->parameters(), world, SGDOptions(1.0), options);
      EXPECT_EQ(Accumulator(optimizer).reduction().when, ReduceMicroSteps::kOnce);
    }
  });
}

TEST(AccumulatorOptionsTest, ChooseWhenToReduceShardedGradientsByTheBytesOfWholeOnes) {
  run_ranks(2, [](comm::World& world) {
    for (const int stage : {2, 3}) {
      Options options;
      options.stage = stage_of(stage);
      Linear model(make_linear(), world, options);
      int64_t whole_bytes = 0;
      for (const zero::PageLayout& page : sharded_parameters_of(model).pages->layouts()) {
        whole_bytes += 4 * page.numel;
      }
      EXPECT_EQ(reduction_of(model, {}),
                c10::str("each: gradients are sharded at this stage: whole gradients take ",
                         whole_bytes, " B, and there is no gradient_budget_bytes"));
      EXPECT_EQ(reduction_of(model, {.gradient_budget_bytes = whole_bytes - 1}),
                c10::str("each: gradients are sharded at this stage: whole gradients take ",
                         whole_bytes, " B and gradient_budget_bytes are ", whole_bytes - 1, " B"));
      EXPECT_EQ(reduction_of(model, {.gradient_budget_bytes = whole_bytes}),
                c10::str("once: whole gradients take ", whole_bytes,
                         " B of a gradient_budget_bytes of ", whole_bytes, " B"));
      EXPECT_EQ(reduction_of(model, {.reduce = ReduceMicroSteps::kOnce}),
                "once: AccumulatorOptions::reduce asks for it");
      EXPECT_EQ(
          reduction_of(model, {.reduce = ReduceMicroSteps::kEach, .gradient_budget_bytes = 1024}),
          "each: AccumulatorOptions::reduce asks for it");
    }
    for (const int stage : {0, 1, 2, 3}) {
      Options invariant;
      invariant.stage = stage_of(stage);
      invariant.world_invariant = true;
      Linear model(make_linear(), world, invariant);
      EXPECT_EQ(reduction_of(model, {.gradient_budget_bytes = 1 << 20}),
                "each: Options::world_invariant adds up the ranks first");
      EXPECT_THAT(error_of([&] { Accumulator(model, {.reduce = ReduceMicroSteps::kOnce}); }),
                  HasSubstr("world_invariant adds up the ranks' first; use ReduceMicroSteps::kEach "
                            "or ReduceMicroSteps::kAuto"));
    }
  });
}

TEST(AccumulatorOptionsTest, CountTheBytesOfGradientsInTheDtypeTheyAddUpIn) {
  run_ranks(2, [](comm::World& world) {
    for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
      Options options;
      options.stage = Stage::kGradients;
      options.compute_dtype = torch::kBFloat16;
      options.accumulate_dtype = dtype;
      Linear model(make_linear(), world, options);
      const int64_t numel = sharded_parameters_of(model).pages->layouts().front().numel;
      const auto bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
      EXPECT_THAT(reduction_of(model, {.gradient_budget_bytes = bytes}), HasSubstr("once: "));
      EXPECT_THAT(reduction_of(model, {.gradient_budget_bytes = bytes - 1}), HasSubstr("each: "));
    }
  });
}

TEST(AccumulatorOptionsTest, OneRankAloneAddsUpWhereItsGradientsLieUnlessTheyLeaveOrAreRounded) {
  run_ranks(1, [](comm::World& world) {
    const auto reduction = [&](Options options, ReduceMicroSteps reduce) {
      options.stage = Stage::kGradients;
      Linear model(make_linear(), world, options);
      return reduction_of(model, {.reduce = reduce});
    };
    EXPECT_EQ(reduction({}, ReduceMicroSteps::kAuto),
              "once: this rank shares the model with no other");
    EXPECT_THAT(reduction({}, ReduceMicroSteps::kEach), HasSubstr("each: "));
    Options invariant;
    invariant.world_invariant = true;
    EXPECT_THAT(reduction(invariant, ReduceMicroSteps::kAuto), HasSubstr("each: "));
    Options offloaded;
    offloaded.offload.optimizer = memory::Tier::kHost;
    EXPECT_THAT(reduction(offloaded, ReduceMicroSteps::kAuto), HasSubstr("each: "));
    Options rounded;
    rounded.compute_dtype = torch::kBFloat16;
    rounded.reduce_dtype = torch::kBFloat16;
    EXPECT_THAT(reduction(rounded, ReduceMicroSteps::kAuto), HasSubstr("each: "));
  });
}

TEST(StepReportTest, SaysWhatHappened) {
  StepReport report;
  report.norm = 1.25;
  report.clipped_norm = 1;
  EXPECT_EQ(report.to_string(), "stepped, norm 1.25 clipped to 1");
  EXPECT_TRUE(report.stepped());
  report.skipped = Skipped::kNormSpike;
  EXPECT_EQ(report.to_string(), "skipped: the norm 1.25 is a spike");
  EXPECT_FALSE(report.stepped());
}

TEST(EnqueuedStepTest, WaitsOnceAndWhenItsReportIsReadOnly) {
  int waits = 0;
  const EnqueuedStep step(std::make_shared<zero::LateReport>([&] {
    ++waits;
    return StepReport{.skipped = Skipped::kNotFinite, .norm = 2, .not_finite = {"a", "b"}};
  }));
  const EnqueuedStep copy = step;
  EXPECT_EQ(waits, 0);
  EXPECT_FALSE(step.report().stepped());
  EXPECT_EQ(copy.report().norm, 2);
  EXPECT_THAT(copy.report().to_string(), HasSubstr("parameters \"a\", \"b\" are not finite"));
  EXPECT_EQ(waits, 1);
}

TEST(EnqueuedStepTest, ThrowsWhatTheDeviceFailedAtWheneverItIsRead) {
  const EnqueuedStep step(std::make_shared<zero::LateReport>(
      []() -> StepReport { throw std::runtime_error("the device is lost"); }));
  for (int read = 0; read < 2; ++read) {
    EXPECT_THAT(error_of([&] { step.report(); }), HasSubstr("the device is lost"));
  }
}

}  // namespace
}  // namespace zeropage::accumulator_test
