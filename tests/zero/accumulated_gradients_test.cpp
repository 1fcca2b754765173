// What a script sees and does between the last backward() of an accumulation and its step().
#include <cmath>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "zeropage/zeropage.h"

namespace zeropage::accumulated_gradients_test {
namespace {

using namespace zeropage::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::optim::SGD;
using torch::optim::SGDOptions;

using Linear = DistributedDataParallel<torch::nn::Linear>;

struct Setting {
  int stage = 0;
  ReduceMicroSteps reduce = ReduceMicroSteps::kAuto;
  bool is_offloaded = false;
  int ranks = 2;
};

std::ostream& operator<<(std::ostream& out, const Setting& setting) {
  return out << "Stage" << setting.stage
             << (setting.reduce == ReduceMicroSteps::kEach ? "Each" : "Once")
             << (setting.is_offloaded ? "Offloaded" : "") << "Ranks" << setting.ranks;
}

torch::nn::Linear make_linear() {
  torch::nn::Linear linear(7, 7);
  const torch::NoGradGuard no_grad;
  for (auto& parameter : linear->parameters()) parameter.fill_(1.0);
  return linear;
}

// One step from weights of 1 by SGD with the rate 1. Without a change the mean gradient is 2.5 in each of 49 weights and 1 in
// each of 7 biases.
class OneStep {
 public:
  OneStep(const Setting& setting, const World& world, AccumulatorOptions options = {})
      : world_(world),
        model_(make_linear(), world, options_of(setting)),
        optimizer_(model_, SGDOptions(1.0)),
        accumulator_(model_, of_three(std::move(options), setting)) {}

  Linear& model() { return model_; }
  Accumulator& accumulator() { return accumulator_; }
  Optimizer<SGD>& optimizer() { return optimizer_; }

  OneStep& backwards() { return backwards_of(1); }
  // The last loss of rank 0 is infinite.
  OneStep& overflowing_backwards() { return backwards_of(std::numeric_limits<double>::infinity()); }
  StepReport step() { return accumulator_.step(optimizer_); }
  // What was taken from a weight and from a bias.
  void expect_taken(double weight, double bias) {
    const GatheredParameters whole(model_);
    EXPECT_NEAR(1 - model_->weight[2][3].item<double>(), weight, 1e-5);
    EXPECT_NEAR(1 - model_->bias[1].item<double>(), bias, 1e-5);
  }

 private:
  OneStep& backwards_of(double last_factor) {
    // 0 1 2 and 3 4 5 on two ranks; 1.5 2.5 3.5 on one.
    const double first = world_.size() == 1 ? 1.5 : 3 * world_.rank();
    for (int micro = 0; micro < 3; ++micro) {
      const double factor = micro == 2 && world_.rank() == 0 ? last_factor : 1;
      accumulator_.backward(model_(torch::full({1, 7}, first + micro)).sum() * factor);
    }
    return *this;
  }
  static Options options_of(const Setting& setting) {
    Options options;
    options.stage = stage_of(setting.stage);
    if (setting.is_offloaded) options.offload.optimizer = Tier::kHost;
    return options;
  }
  static AccumulatorOptions of_three(AccumulatorOptions options, const Setting& setting) {
    options.micro_steps = 3;
    options.reduce = setting.reduce;
    return options;
  }

  const World& world_;
  Linear model_;
  Optimizer<SGD> optimizer_;
  Accumulator accumulator_;
};

const double kNorm = std::sqrt(49 * 2.5 * 2.5 + 7);

class AccumulatedGradientsTest : public ::testing::TestWithParam<Setting> {
 protected:
  void run(const std::function<void(const World& world)>& script) const {
    run_ranks(GetParam().ranks, script);
  }
};

TEST_P(AccumulatedGradientsTest, AreTheMeanForWhoReadsThem) {
  run([](const World& world) {
    OneStep one(GetParam(), world);
    one.backwards();
    EXPECT_NEAR(one.model()->weight.grad()[2][3].item<double>(), 2.5, 1e-5);
    EXPECT_NEAR(one.model()->weight.grad().norm().item<double>(), 7 * 2.5, 1e-5);
    EXPECT_NEAR(one.step().norm, kNorm, 1e-5);
    one.expect_taken(2.5, 1);
    one.backwards();
    EXPECT_NEAR(one.model()->bias.grad()[2].item<double>(), 1, 1e-6) << "in each step anew";
    one.step();
    one.expect_taken(5, 2);
  });
}

// Zeros are read of a host tier that the sum has not come to.
TEST_P(AccumulatedGradientsTest, BetweenMicroBatchesAreASumSoFarOrRefused) {
  run([](const World& world) {
    OneStep one(GetParam(), world);
    one.accumulator().backward(one.model()(torch::ones({1, 7})).sum());
    const bool is_reduced = one.accumulator().reduction().when == ReduceMicroSteps::kEach;
    double sum = 0;
    const std::string words =
        error_of([&] { sum = one.model()->bias.grad().sum().item<double>(); });
    if (GetParam().is_offloaded && GetParam().stage >= 2 && is_reduced) {
      EXPECT_THAT(words, AllOf(HasSubstr("between the micro-batches of a step"),
                               HasSubstr("look behind the last backward()")));
    } else {
      EXPECT_EQ(words, "");
      EXPECT_EQ(sum, is_reduced ? 7 * world.size() : 7);
    }
    for (int micro = 1; micro < 3; ++micro) {
      one.accumulator().backward(one.model()(torch::ones({1, 7})).sum());
    }
    EXPECT_EQ(one.model()->bias.grad().sum().item<double>(), 7);
    one.step();
    one.expect_taken(1, 1);
  });
}

// Whatever makes numbers of them, the step is left out and the scale is lowered.
TEST_P(AccumulatedGradientsTest, ThatOverflowedMakeNoStepHoweverTheyAreClipped) {
  using Clip = std::function<double(OneStep & one)>;
  const std::vector<Clip> clips = {
      [](OneStep& one) { return clip_grad_norm_(one.model(), 1.0).before; },
      [](OneStep& one) {
        clip_grad_value_(one.model(), 1.0);
        return gradient_norm(one.model()).total;
      },
      [](OneStep& one) {
        return torch::nn::utils::clip_grad_norm_(one.model()->parameters(), 1.0);
      },
      [](OneStep& one) {
        torch::nn::utils::clip_grad_value_(one.model()->parameters(), 1.0);
        return gradient_norm(one.model()).total;
      }};
  run([&](const World& world) {
    AccumulatorOptions options;
    options.loss_scaler = accumulate::LossScalerOptions{.initial_scale = 1024};
    for (size_t clip = 0; clip < clips.size(); ++clip) {
      SCOPED_TRACE(clip);
      OneStep one(GetParam(), world, options);
      one.overflowing_backwards();
      const double norm = clips[clip](one);
      EXPECT_EQ(std::isfinite(norm), clip % 2 == 1) << norm;
      const StepReport report = one.step();
      EXPECT_EQ(report.skipped, Skipped::kNotFinite);
      EXPECT_EQ(report.not_finite.size(), 2U);
      EXPECT_FALSE(std::isfinite(report.norm));
      EXPECT_EQ(report.next_loss_scale, 512);
      one.expect_taken(0, 0);
      EXPECT_NEAR(clip_grad_norm_(one.backwards().model(), 1000).before, kNorm, 1e-4);
      EXPECT_TRUE(one.step().stepped());
      one.expect_taken(2.5, 1);
    }
  });
}

// No loss scale is to blame for it, and no step would lower one.
TEST_P(AccumulatedGradientsTest, ThatAreNotFiniteThrowWhereTheyAreClippedWithoutALossScale) {
  run([](const World& world) {
    OneStep one(GetParam(), world);
    one.overflowing_backwards();
    EXPECT_THAT(error_of([&] { clip_grad_norm_(one.model(), 1.0); }),
                HasSubstr("NotFinite::kReturn"));
    EXPECT_FALSE(std::isfinite(clip_grad_norm_(one.model(), 1.0, NotFinite::kReturn).after));
  });
}

TEST_P(AccumulatedGradientsTest, AreTheMeanForWhoeverReadsThemFirst) {
  using Read = std::function<torch::Tensor(const torch::Tensor& gradient)>;
  const std::vector<Read> reads = {
      [](const auto& gradient) { return gradient.contiguous(); },
      [](const auto& gradient) { return gradient.clone(); },
      [](const auto& gradient) { return gradient.detach().reshape({-1}); },
      [](const auto& gradient) { return gradient.t().reshape({-1}); },
      [](const auto& gradient) { return gradient.to(torch::kDouble); },
      [](const auto& gradient) { return gradient.flatten().slice(0, 3, 5); },
      [](const auto& gradient) { return gradient * 1; },
      [](const auto& gradient) { return gradient.data().mean(); },
      [](const auto& gradient) {
        return torch::stack({gradient, gradient});
      },
      [](const auto& gradient) {
        return torch::ones({7, 7}).mul_(gradient);
      },
      [](const auto& gradient) {
        return torch::full({7, 7}, 6.25).div_(gradient);
      },
      [](const auto& gradient) { return torch::Tensor(gradient).div_(1, "trunc") + 0.5; },
      [](const auto& gradient) {
        return torch::zeros({7, 7}).copy_(gradient);
      }};
  for (const Read& read : reads) {
    run([&](const World& world) {
      OneStep one(GetParam(), world);
      one.backwards();
      const torch::NoGradGuard no_grad;
      EXPECT_NEAR(read(one.model()->weight.grad()).mean().item<double>(), 2.5, 1e-5)
          << &read - reads.data();
    });
  }
}

TEST_P(AccumulatedGradientsTest, AreTheMeanUnderAGuard) {
  run([](const World& world) {
    OneStep one(GetParam(), world);
    one.backwards();
    {
      const GatheredGradients whole(one.model());
      EXPECT_NEAR(one.model()->weight.grad()[2][3].item<double>(), 2.5, 1e-5);
    }
    one.step();
    one.expect_taken(2.5, 1);
  });
}

TEST_P(AccumulatedGradientsTest, AreClippedByTheNormOfTheMean) {
  run([](const World& world) {
    OneStep by_torch(GetParam(), world), by_us(GetParam(), world);
    by_torch.backwards();
    EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(by_torch.model().parameters(), 1.0), kNorm, 1e-4);
    EXPECT_NEAR(by_torch.step().norm, 1, 1e-5);
    by_torch.expect_taken(2.5 / kNorm, 1 / kNorm);
    by_us.backwards();
    EXPECT_NEAR(gradient_norm(by_us.model()).total, kNorm, 1e-4);
    EXPECT_NEAR(clip_grad_norm_(by_us.model(), 1.0).before, kNorm, 1e-4);
    by_us.step();
    by_us.expect_taken(2.5 / kNorm, 1 / kNorm);
  });
}

TEST_P(AccumulatedGradientsTest, AreClippedByTheValuesOfTheMean) {
  run([](const World& world) {
    OneStep by_torch(GetParam(), world), by_us(GetParam(), world);
    by_torch.backwards();
    torch::nn::utils::clip_grad_value_(by_torch.model().parameters(), 2.0);
    by_torch.step();
    by_torch.expect_taken(2, 1);
    by_us.backwards();
    clip_grad_value_(by_us.model(), 2.0);
    by_us.step();
    by_us.expect_taken(2, 1);
  });
}

TEST_P(AccumulatedGradientsTest, AreClippedAgainByTheAccumulator) {
  run([](const World& world) {
    OneStep one(GetParam(), world, {.clip_norm = 0.5});
    one.backwards();
    torch::nn::utils::clip_grad_norm_(one.model().parameters(), 1.0);
    const StepReport report = one.step();
    EXPECT_NEAR(report.norm, 1, 1e-5);
    EXPECT_NEAR(report.clipped_norm, 0.5, 1e-5);
    one.expect_taken(0.5 * 2.5 / kNorm, 0.5 / kNorm);
  });
}

TEST_P(AccumulatedGradientsTest, MayBeScaledZeroedDroppedAndReplaced) {
  run([](const World& world) {
    const torch::NoGradGuard no_grad;
    const auto changed = [&](const auto& change, double weight, double bias) {
      OneStep one(GetParam(), world);
      {
        const torch::AutoGradMode on(true);
        one.backwards();
      }
      change(one.model()->weight, one.model()->bias);
      one.step();
      one.expect_taken(weight, bias);
    };
    changed([](auto& weight, auto&) { weight.mutable_grad().mul_(0.5); }, 1.25, 1);
    changed([](auto& weight, auto&) { weight.mutable_grad().add_(0.5); }, 3, 1);
    changed([](auto&, auto& bias) { bias.mutable_grad().zero_(); }, 2.5, 0);
    changed([](auto& weight, auto&) { weight.mutable_grad() = torch::Tensor(); }, 0, 1);
    changed([](auto&, auto& bias) { bias.mutable_grad() = torch::full({7}, 4.0); }, 2.5, 4);
    changed(
        [](auto& weight, auto& bias) {
          bias.mutable_grad() = torch::full({7}, 4.0);
          weight.mutable_grad().mul_(2);
        },
        5, 4);
    changed(
        [](auto& weight, auto& bias) {
          bias.mutable_grad() = torch::Tensor();
          weight.mutable_grad().mul_(2);
          bias.mutable_grad() = torch::full({7}, 3.0);
        },
        5, 3);
  });
}

// Where no backward gave one, it is each rank's own.
TEST_P(AccumulatedGradientsTest, ThatAreSetByHandAreAveraged) {
  run([](const World& world) {
    for (const bool looks : {false, true}) {
      OneStep one(GetParam(), world);
      for (int micro = 0; micro < 3; ++micro) {
        one.accumulator().backward(one.model()->weight.sum() * 2);
      }
      EXPECT_FALSE(one.model()->bias.grad().defined());
      if (looks) {
        EXPECT_NEAR(one.model()->weight.grad()[0][0].template item<double>(), 2, 1e-6);
      }
      one.model()->bias.mutable_grad() = torch::full({7}, 1.0 + world.rank());
      one.step();
      one.expect_taken(2, world.size() == 1 ? 1 : 1.5);
    }
  });
}

TEST_P(AccumulatedGradientsTest, AreTheMeanOverTheWeightsOfMicroBatches) {
  run([](const World& world) {
    OneStep one(GetParam(), world);
    const double of_rank = 1 + world.rank();
    for (int micro = 0; micro < 3; ++micro) {
      one.accumulator().backward(one.model()->weight.sum() * of_rank, 2 * of_rank);
    }
    const double mean = world.size() == 1 ? 1 : (1 * 2 + 2 * 4) / 6.0;
    EXPECT_NEAR(one.model()->weight.grad()[2][3].item<double>(), mean, 1e-6);
    one.step();
    one.expect_taken(mean, 0);
  });
}

TEST_P(AccumulatedGradientsTest, AreTheMeanWithoutTheScaleOfTheLoss) {
  run([](const World& world) {
    OneStep one(GetParam(), world,
                {.loss_scaler = accumulate::LossScalerOptions{.initial_scale = 1024}});
    one.backwards();
    EXPECT_NEAR(one.model()->weight.grad()[2][3].item<double>(), 2.5, 1e-5);
    const StepReport report = one.step();
    EXPECT_EQ(report.loss_scale, 1024);
    EXPECT_NEAR(report.norm, kNorm, 1e-5);
    one.expect_taken(2.5, 1);
  });
}

TEST_P(AccumulatedGradientsTest, SkipAStepWhereTheyAreNotFiniteAlsoForWhoHasLooked) {
  run([](const World& world) {
    OneStep one(GetParam(), world,
                {.loss_scaler = accumulate::LossScalerOptions{.initial_scale = 1024}});
    for (int micro = 0; micro < 3; ++micro) {
      one.accumulator().backward(one.model()->bias.sum() * (micro == 1 ? INFINITY : 1.0));
    }
    EXPECT_FALSE(one.model()->bias.grad().isfinite().all().item<bool>());
    EXPECT_EQ(one.step().skipped, Skipped::kNotFinite);
    one.expect_taken(0, 0);
  });
}

TEST_P(AccumulatedGradientsTest, AreNotSteppedByTheOptimizerAloneHoweverOftenSomebodyLooks) {
  run([](const World& world) {
    OneStep one(GetParam(), world);
    one.backwards();
    EXPECT_NEAR(gradient_norm(one.model()).total, kNorm, 1e-4);
    EXPECT_NEAR(gradient_norm(one.model()).total, kNorm, 1e-4);
    EXPECT_THAT(error_of([&] { one.optimizer().step(); }),
                HasSubstr("accumulator.step(optimizer)"));
    one.step();
    one.expect_taken(2.5, 1);
  });
}

TEST_P(AccumulatedGradientsTest, MayBeAbandonedByWhoHasLooked) {
  run([](const World& world) {
    OneStep one(GetParam(), world);
    one.backwards();
    const torch::Tensor kept = one.model()->weight.grad();
    EXPECT_NEAR(kept[2][3].item<double>(), 2.5, 1e-5);
    one.accumulator().abandon();
    one.backwards().step();
    one.expect_taken(2.5, 1);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Settings, AccumulatedGradientsTest, ::testing::ValuesIn([] {
      std::vector<Setting> all;
      for (const int stage : {0, 1, 2, 3}) {
        for (const auto reduce : {ReduceMicroSteps::kEach, ReduceMicroSteps::kOnce}) {
          all.push_back({.stage = stage, .reduce = reduce});
        }
        all.push_back({.stage = stage, .is_offloaded = true});
        all.push_back({.stage = stage, .ranks = 1});
      }
      return all;
    }()),
    ::testing::PrintToStringParamName());

// On rank 0 alone it would wait for the others, and these make the step.
TEST(AccumulatedGradientsOfOneRankTest, ThatLooksAloneAreRefusedByName) {
  const auto errors = try_ranks(2, [](const World& world) {
    OneStep one({.stage = 0}, world);
    one.backwards();
    if (world.rank() == 0) one.model()->weight.grad().norm();
    one.step();
  });
  EXPECT_THAT(
      message_of(errors[0]) + message_of(errors[1]),
      AllOf(HasSubstr("is out of step"), HasSubstr("the weight of a step's micro-batches")));
}

TEST(AccumulatedGradientsInHalfTest, AreNotReadWithTheScaleOfTheLoss) {
  run_ranks(1, [](const World& world) {
    Options options;
    options.compute_dtype = options.accumulate_dtype = torch::kHalf;
    Linear model(make_linear(), world, options);
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    Accumulator accumulator(
        model,
        {.micro_steps = 1, .loss_scaler = accumulate::LossScalerOptions{.initial_scale = 1024}});
    accumulator.backward(model(torch::ones({1, 7})).to(torch::kFloat).sum());
    for (int time = 0; time < 2; ++time) {
      EXPECT_THAT(error_of([&] { model->weight.grad().norm(); }),
                  AllOf(HasSubstr("it is in half, and multiplied by the loss scale 1024"),
                        HasSubstr("AccumulatorOptions::clip_norm")));
    }
    EXPECT_EQ(accumulator.step(optimizer).skipped, Skipped::kNo);
  });
}

}  // namespace
}  // namespace zeropage::accumulated_gradients_test
