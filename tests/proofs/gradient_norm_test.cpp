// The norm of the gradients is one number at every stage and number of ranks, and clipping by it is
// LibTorch's.
#include <limits>
#include <mutex>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/accumulated.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"

namespace zeropage::gradient_norm_test {
namespace {

using namespace zeropage::testing;
using ::testing::HasSubstr;
using memory::operator""_KiB;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

constexpr int kManyRanks[] = {1, 2, 3, 4, 8};

Options options_of(int stage) {
  Options options;
  options.stage = stage_of(stage);
  options.page_bytes = 4_KiB;  // "wide" and "many" have pages of their own
  return options;
}

using WithModel = std::function<void(DistributedDataParallel<Ragged>&)>;
void at_every_stage(int ranks, const WithModel& fn) {
  for (const int stage : {0, 1, 2, 3}) {
    SCOPED_TRACE(c10::str(ranks, " ranks, stage ", stage));
    run_ranks(ranks, [&](comm::World& world) {
      DistributedDataParallel<Ragged> model(Ragged(), world, options_of(stage));
      fn(model);
    });
  }
}

// The same on every rank, so that their mean is it.
void backward(DistributedDataParallel<Ragged>& model, int index = 0) {
  loss_with_known_gradients(model.named_parameters(), index).backward();
}

// The known gradients as a plain module has them after backward.
Ragged plain_after_backward() {
  Ragged plain;
  loss_with_known_gradients(plain->named_parameters(), 0).backward();
  return plain;
}

std::vector<torch::Tensor> gradients_of(const Ragged& module) {
  std::vector<torch::Tensor> gradients;
  for (const auto& parameter : module->parameters()) gradients.push_back(parameter.grad());
  return gradients;
}

TEST(GradientNormTest, IsOneNumberAtEveryStageAndForAnyRanks) {
  const double expected = norm_of(gradients_of(plain_after_backward()));
  std::mutex mutex;
  std::set<double> norms;
  for (const int ranks : kManyRanks) {
    at_every_stage(ranks, [&](DistributedDataParallel<Ragged>& model) {
      backward(model);
      const GradientNorm norm = gradient_norm(model);
      EXPECT_TRUE(norm.not_finite.empty());
      EXPECT_TRUE(norm.of_group.empty());
      EXPECT_EQ(gradient_norm(model).total, norm.total) << "looking changes nothing";
      const std::lock_guard lock(mutex);
      norms.insert(norm.total);
    });
  }
  ASSERT_EQ(norms.size(), 1U) << ::testing::PrintToString(norms);
  EXPECT_NEAR(*norms.begin(), expected, 1e-12 * expected);
}

// Squares of these are not exact, nor are sums of a few of them.
TEST(GradientNormTest, IsOneNumberWhereSquaresAreRounded) {
  at::set_num_threads(1);
  std::mutex mutex;
  std::set<double> norms;
  for (const int ranks : {1, 2, 4, 8}) {
    for (const int stage : {0, 1, 2, 3}) {
      run_ranks(ranks, [&](comm::World& world) {
        DistributedDataParallel<Transformer> model(make_seeded<Transformer>(), world,
                                                   options_of(stage));
        const Samples samples = samples_of(0, 0);  // the same on all ranks
        loss_of(model(samples.inputs), samples).backward();
        const double norm = gradient_norm(model).total;
        const std::lock_guard lock(mutex);
        norms.insert(norm);
      });
    }
  }
  ASSERT_EQ(norms.size(), 1U) << ::testing::PrintToString(norms);
  Transformer plain = make_seeded<Transformer>();
  loss_of(plain->forward(samples_of(0, 0).inputs), samples_of(0, 0)).backward();
  std::vector<torch::Tensor> gradients;
  for (const auto& parameter : plain->parameters()) gradients.push_back(parameter.grad());
  EXPECT_NEAR(*norms.begin(), norm_of(gradients), 1e-12 * norm_of(gradients));
}

// Norms of a few blocks whose sums are rounded, where shards begin in the middle of a parameter that
// does not begin with a block: of 400 elements of "many", further on in each draw.
std::vector<double> norms_of_random_gradients(int ranks, int stage) {
  std::vector<double> norms;
  run_ranks(ranks, [&](comm::World& world) {
    Options options = options_of(stage);
    options.page_bytes = 64_KiB;  // all parameters in a page
    DistributedDataParallel<Ragged> model(Ragged(), world, options);
    const torch::Tensor many = model.named_parameters()["many"];
    for (int64_t draw = 0; draw < 46; ++draw) {
      auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(draw + 1));
      auto gradient = torch::zeros({5003});
      gradient.narrow(0, 100 * draw, 400).copy_(torch::randn({400}, generator));
      model.zero_grad();
      (many * gradient).sum().backward();
      const double norm = gradient_norm(model).total;
      if (world.rank() == 0) norms.push_back(norm);
    }
  });
  return norms;
}

TEST(GradientNormTest, IsOneNumberWhereShardsBeginAnywhere) {
  const auto expected = norms_of_random_gradients(1, 0);
  for (const int ranks : {2, 4, 8}) {
    for (const int stage : {0, 2, 3}) {
      EXPECT_EQ(norms_of_random_gradients(ranks, stage), expected)
          << ranks << " ranks, stage " << stage;
    }
  }
}

TEST(GradientNormTest, IsThatOfTheParametersInAGroup) {
  const Ragged plain = plain_after_backward();
  const auto named = plain->named_parameters();
  const auto norm_of_names = [&](const std::vector<std::string>& names) {
    std::vector<torch::Tensor> gradients;
    for (const std::string& name : names) gradients.push_back(named[name].grad());
    return norm_of(gradients);
  };
  for (const int ranks : {1, 3, 4}) {
    at_every_stage(ranks, [&](DistributedDataParallel<Ragged>& model) {
      const auto of = [&](const std::vector<std::string>& names) {
        std::vector<torch::Tensor> parameters;
        for (const std::string& name : names) parameters.push_back(model.named_parameters()[name]);
        return torch::optim::OptimizerParamGroup(parameters);
      };
      // "block" is in none.
      Optimizer<AdamW> optimizer(
          model,
          std::vector<torch::optim::OptimizerParamGroup>{
              of({"wide", "empty", "frozen"}), of({"scalar", "many", "unused"}), of({"odd"})},
          AdamWOptions(0.01));
      backward(model);
      const GradientNorm norm = gradient_norm(model, optimizer);
      ASSERT_EQ(norm.of_group.size(), 3U);
      const auto expect_close = [](double actual, double expected) {
        EXPECT_NEAR(actual, expected, 1e-12 * expected);
      };
      expect_close(norm.of_group[0], norm_of_names({"wide"}));
      expect_close(norm.of_group[1], norm_of_names({"scalar", "many"}));
      expect_close(norm.of_group[2], norm_of_names({"odd"}));
      expect_close(norm.total, norm_of_names({"wide", "scalar", "many", "odd"}));
    });
  }
}

TEST(GradientNormTest, IsZeroWhereNothingHasAGradient) {
  at_every_stage(2, [](DistributedDataParallel<Ragged>& model) {
    EXPECT_EQ(gradient_norm(model).total, 0);
    backward(model);
    EXPECT_GT(gradient_norm(model).total, 0);
    model.zero_grad();
    EXPECT_EQ(gradient_norm(model).total, 0);
  });
}

// Steps of plain SGD show the gradient that the optimizer took.
void expect_stepped_by(DistributedDataParallel<Ragged>& model, Optimizer<SGD>& optimizer,
                       const Ragged& plain) {
  const auto before = copies_of(model.parameters());
  optimizer.step();
  const auto after = copies_of(model.parameters());
  const auto expected = plain->parameters();
  for (size_t i = 0; i < after.size(); ++i) {
    const torch::Tensor& gradient = expected[i].grad();
    const torch::Tensor want = gradient.defined() ? before[i] - gradient : before[i];
    if (want.numel() == 0) continue;
    EXPECT_LE((want - after[i]).abs().max().item<double>(), 1e-6) << "parameter " << i;
  }
}

TEST(ClipTest, ByNormIsLibTorchsAtEveryStageAndIsStepped) {
  const Ragged plain = plain_after_backward();
  const double expected = torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.75);
  for (const int ranks : {1, 2, 3}) {
    at_every_stage(ranks, [&](DistributedDataParallel<Ragged>& model) {
      Optimizer<SGD> optimizer(model, SGDOptions(1.0));
      backward(model);
      const ClippedNorm norm = clip_grad_norm_(model, 0.75);
      const double as_libtorch_returns_it = norm;
      EXPECT_EQ(as_libtorch_returns_it, norm.before);
      EXPECT_NEAR(norm.before, expected, 1e-6 * expected);
      EXPECT_NEAR(norm.after, 0.75, 1e-6);
      EXPECT_NEAR(gradient_norm(model).total, norm.after, 1e-6);
      expect_stepped_by(model, optimizer, plain);
    });
  }
}

TEST(ClipTest, ByANormThatIsNotReachedChangesNoBit) {
  at_every_stage(2, [](DistributedDataParallel<Ragged>& model) {
    backward(model);
    const double norm = gradient_norm(model).total;
    const ClippedNorm clipped = clip_grad_norm_(model, 2 * norm);
    EXPECT_EQ(clipped.before, norm);
    EXPECT_EQ(clipped.after, norm);
    EXPECT_EQ(gradient_norm(model).total, norm);
  });
}

TEST(ClipTest, ByValueIsLibTorchsAtEveryStageAndIsStepped) {
  const Ragged plain = plain_after_backward();
  torch::nn::utils::clip_grad_value_(plain->parameters(), 0.25);
  for (const int ranks : {1, 2, 3}) {
    at_every_stage(ranks, [&](DistributedDataParallel<Ragged>& model) {
      Optimizer<SGD> optimizer(model, SGDOptions(1.0));
      backward(model);
      clip_grad_value_(model, 0.25);
      expect_stepped_by(model, optimizer, plain);
    });
  }
}

TEST(ClipTest, AfterNoSyncClipsTheSumOfAllBackwards) {
  Ragged plain = plain_after_backward();
  loss_with_known_gradients(plain->named_parameters(), 5).backward();
  const double expected = torch::nn::utils::clip_grad_norm_(plain->parameters(), 1.5);
  for (const int ranks : {1, 2, 3}) {
    at_every_stage(ranks, [&](DistributedDataParallel<Ragged>& model) {
      Optimizer<SGD> optimizer(model, SGDOptions(1.0));
      {
        const NoSync guard = model.no_sync();
        backward(model);
      }
      backward(model, 5);
      EXPECT_NEAR(clip_grad_norm_(model, 1.5).before, expected, 1e-6 * expected);
      expect_stepped_by(model, optimizer, plain);
      // Nothing of it is left in the next step.
      model.zero_grad();
      backward(model);
      EXPECT_NEAR(gradient_norm(model).total, norm_of(gradients_of(plain_after_backward())), 1e-9);
    });
  }
}

// On one rank alone, in two parameters.
TEST(ClipTest, NamesTheParameterThatIsNotFiniteAndChangesNothing) {
  for (const double bad :
       {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    at_every_stage(3, [&](DistributedDataParallel<Ragged>& model) {
      Optimizer<SGD> optimizer(model, SGDOptions(1.0));
      const auto before = copies_of(model.parameters());
      auto loss = loss_with_known_gradients(model.named_parameters(), 0);
      if (model.world().rank() == 2) {
        auto many = model.named_parameters()["many"];
        auto odd = model.named_parameters()["odd"];
        loss = loss + (many.narrow(0, 5002, 1) * bad).sum() + (odd.narrow(0, 0, 1) * bad).sum();
      }
      loss.backward();
      const GradientNorm norm = gradient_norm(model);
      EXPECT_EQ(norm.not_finite, (std::vector<std::string>{"odd", "many"}));
      EXPECT_FALSE(std::isfinite(norm.total));
      std::string message;
      try {
        clip_grad_norm_(model, 1.0);
      } catch (const c10::Error& error) {
        message = error.what_without_backtrace();
      }
      EXPECT_THAT(
          message,
          HasSubstr("parameters \"odd\", \"many\" are not finite; no gradient was changed"));
      EXPECT_FALSE(std::isfinite(clip_grad_norm_(model, 1.0, NotFinite::kReturn).after));
      model.zero_grad();
      optimizer.step();
      EXPECT_TRUE(same_bits(before, copies_of(model.parameters())));
    });
  }
}

// ---- of an accumulation ----

TEST(AccumulatorClipTest, ByNormAndByValueIsLibTorchsOfTheMean) {
  for (const bool by_value : {false, true}) {
    Ragged plain;
    for (int index = 0; index < 4; ++index) {
      (loss_with_known_gradients(plain->named_parameters(), index) / 4).backward();
    }
    const double norm = norm_of(gradients_of(plain));
    if (by_value) {
      torch::nn::utils::clip_grad_value_(plain->parameters(), 0.5);
    } else {
      torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.75);
    }
    AccumulatorOptions options{.micro_steps = 2};
    if (by_value) options.clip_value = 0.5;
    if (!by_value) options.clip_norm = 0.75;
    for (const auto reduce : {ReduceMicroSteps::kEach, ReduceMicroSteps::kOnce}) {
      options.reduce = reduce;
      at_every_stage(2, [&](DistributedDataParallel<Ragged>& model) {
        Optimizer<SGD> optimizer(model, SGDOptions(1.0));
        Accumulator accumulator(model, options);
        const auto before = copies_of(model.parameters());
        for (int micro = 0; micro < 2; ++micro) {
          accumulator.backward(loss_with_known_gradients(model.named_parameters(),
                                                         2 * micro + model.world().rank()));
        }
        const StepReport report = accumulator.step(optimizer);
        EXPECT_NEAR(report.norm, norm, 1e-12 * norm);
        EXPECT_NEAR(report.clipped_norm, by_value ? norm : 0.75, 1e-6 * norm);
        const auto after = copies_of(model.parameters());
        const auto expected = plain->parameters();
        for (size_t i = 0; i < after.size(); ++i) {
          if (!expected[i].grad().defined() || after[i].numel() == 0) continue;
          EXPECT_LE((before[i] - expected[i].grad() - after[i]).abs().max().item<double>(), 1e-6)
              << "parameter " << i;
        }
      });
    }
  }
}

}  // namespace
}  // namespace zeropage::gradient_norm_test
