#include "zeropage/optimizer.h"

#include <atomic>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/optim/schedulers/step_lr.h>

#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "tests/harness/reference.h"
#include "tests/harness/tiny_models.h"

namespace {

// An optimizer of a user: element-wise, with an option and no state.
struct SignOptions : torch::optim::OptimizerCloneableOptions<SignOptions> {
  explicit SignOptions(double lr = 0.5) : lr_(lr) {}
  TORCH_ARG(double, lr) = 0.5;
  double get_lr() const override { return lr(); }
  void set_lr(double value) override { lr(value); }
};

// As if the device had failed.
std::atomic<bool> sign_fails{false};

struct Sign : torch::optim::Optimizer {
  Sign(const std::vector<torch::optim::OptimizerParamGroup>& groups, SignOptions options)
      : Optimizer(groups, std::make_unique<SignOptions>(options)) {}
  torch::Tensor step(LossClosure) override {
    const torch::NoGradGuard no_grad;
    TORCH_CHECK(!sign_fails, "the device failed");
    for (auto& group : param_groups_) {
      const double lr = static_cast<SignOptions&>(group.options()).lr();
      for (auto& p : group.params()) {
        if (p.grad().defined()) p.sub_(lr * p.grad().sign());
      }
    }
    return {};
  }
};

}  // namespace

template <>
struct zeropage::OptimizerTraits<Sign> {
  using Options = SignOptions;
  static constexpr UpdateReads kReads = UpdateReads::kElement;
};

namespace zeropage::optimizer_test {
namespace {

using namespace zeropage::testing;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGD;
using torch::optim::SGDOptions;

torch::nn::Linear make_linear() {
  torch::nn::Linear linear(7, 7);
  const torch::NoGradGuard no_grad;
  for (auto& parameter : linear->parameters()) parameter.fill_(1.0);
  return linear;
}

OptimizerParamGroup group(std::vector<torch::Tensor> parameters, double lr) {
  return {std::move(parameters), std::make_unique<SGDOptions>(lr)};
}

void backward(torch::nn::Linear& linear, double value) {
  linear(torch::full({1, 7}, value)).sum().backward();
}

class OptimizerTest : public ::testing::TestWithParam<int> {
 protected:
  Options options() const {
    Options options;
    options.stage = stage_of(GetParam());
    options.update_by = UpdateBy::kClass;  // whose bits a plain run has
    return options;
  }
};

TEST_P(OptimizerTest, RefusesToGoOnAfterAStepThatFailed) {
  run_ranks(1, [&](comm::World& world) {
    DistributedDataParallel<torch::nn::Linear> model(make_linear(), world, options());
    Optimizer<Sign> optimizer(model, SignOptions(0.5));
    backward(model.module(), 1.0);
    sign_fails = true;
    const std::string first = error_of([&] { optimizer.step(); });
    sign_fails = false;
    EXPECT_THAT(first, ::testing::AllOf(::testing::HasSubstr("the device failed"),
                                        ::testing::HasSubstr("updating page \"")));
    EXPECT_THAT(error_of([&] { optimizer.step(); }),
                ::testing::HasSubstr("restart from the last saved state. It said: the device"));
  });
}

TEST_P(OptimizerTest, GivesEveryGroupItsOwnOptions) {
  run_ranks(3, [&](comm::World& world) {
    DistributedDataParallel<torch::nn::Linear> model(make_linear(), world, options());
    Optimizer<SGD> optimizer(model, {group({model->weight}, 1.0), group({model->bias}, 0.25)},
                             SGDOptions(9.0));
    backward(model.module(), 1.0);
    optimizer.step();
    EXPECT_TRUE(model->weight.eq(0).all().item<bool>());
    EXPECT_TRUE(model->bias.eq(0.75).all().item<bool>());
  });
}

TEST_P(OptimizerTest, MakesStateForAllGroupsOfAClassThatMakesItAtOnce) {
  run_ranks(2, [&](comm::World& world) {
    using torch::optim::Adagrad;
    using torch::optim::AdagradOptions;
    DistributedDataParallel<torch::nn::Linear> model(make_linear(), world, options());
    Optimizer<Adagrad> optimizer(model, {{{model->weight}}, {{model->bias}}}, AdagradOptions(1.0));
    // Rank 1's shard of so small a page is padding.
    if (world.rank() == 0) {
      EXPECT_GT(memory::Ledger::current()->now()[memory::Kind::kOptimizerState], 0);
    }
    backward(model.module(), 1.0);
    optimizer.step();
    EXPECT_NEAR(model->weight[0][0].item<double>(), 0.0, 1e-6);
    EXPECT_NEAR(model->bias[0].item<double>(), 0.0, 1e-6);
  });
}

TEST_P(OptimizerTest, StepsGroupsThatAreAddedLater) {
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<torch::nn::Linear> model(make_linear(), world, options());
    Optimizer<SGD> optimizer(model, {group({model->weight}, 1.0)}, SGDOptions(9.0));
    backward(model.module(), 1.0);
    optimizer.step();
    EXPECT_TRUE(model->bias.eq(1).all().item<bool>()) << "not in a group yet";
    torch::optim::Optimizer& as_base = optimizer;
    as_base.add_param_group(group({model->bias}, 0.5));
    optimizer.step();
    EXPECT_TRUE(model->bias.eq(0.5).all().item<bool>());
  });
}

TEST_P(OptimizerTest, ObeysSchedulers) {
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<torch::nn::Linear> model(make_linear(), world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    torch::optim::StepLR by_step(optimizer, /*step_size=*/1, /*gamma=*/0.5);
    torch::optim::ReduceLROnPlateauScheduler on_plateau(
        optimizer, torch::optim::ReduceLROnPlateauScheduler::min,
        /*factor=*/0.1, /*patience=*/0);
    const auto change = [&] {
      const double before = model->bias[0].item<double>();
      optimizer.zero_grad();
      backward(model.module(), 1.0);
      optimizer.step();
      return before - model->bias[0].item<double>();
    };
    EXPECT_NEAR(change(), 1.0, 1e-6);
    // LibTorch's StepLR counts its first call as the beginning.
    by_step.step();
    by_step.step();
    EXPECT_NEAR(change(), 0.5, 1e-6);
    on_plateau.step(1.0);
    on_plateau.step(2.0);
    EXPECT_NEAR(change(), 0.05, 1e-6);
  });
}

TEST_P(OptimizerTest, RunsTheClosure) {
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<torch::nn::Linear> model(make_linear(), world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    const auto loss = optimizer.step([&] {
      optimizer.zero_grad();
      auto value = model(torch::ones({1, 7})).sum();
      value.backward();
      return value;
    });
    EXPECT_EQ(loss.item<double>(), 7 * 8);
    EXPECT_TRUE(model->bias.eq(0).all().item<bool>());
  });
}

TEST_P(OptimizerTest, TakesAUsersElementWiseClass) {
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<torch::nn::Linear> model(make_linear(), world, options());
    Optimizer<Sign> optimizer(model, SignOptions(0.5));
    backward(model.module(), 9.0);
    optimizer.step();
    EXPECT_TRUE(model->weight.eq(0.5).all().item<bool>());
  });
}

// One rank of the drop-in: plain modules, plain backward.
TEST_P(OptimizerTest, AloneAveragesGradientsAndEqualsPlainTraining) {
  at::set_num_threads(1);
  const auto make = [] {
    static std::mutex mutex;
    std::lock_guard lock(mutex);
    torch::manual_seed(3);
    return Oddball();
  };
  for (const int ranks : {1, 2, 3}) {
    const auto expected =
        train_reference<Oddball>(ranks, 3, make, [](std::vector<torch::Tensor> parameters) {
          return std::make_unique<AdamW>(std::move(parameters), AdamWOptions(0.01));
        });
    run_ranks(ranks, [&](comm::World& world) {
      Oddball net = make();
      Optimizer<AdamW> optimizer(net->parameters(), world, AdamWOptions(0.01), options());
      for (int step = 0; step < 3; ++step) {
        const Samples samples = samples_of(world.rank(), step);
        optimizer.zero_grad();
        loss_of(net->forward(samples.inputs), samples).backward();
        optimizer.step();
      }
      EXPECT_TRUE(same_bits(expected, net->parameters())) << ranks << " ranks";
    });
  }
}

TEST_P(OptimizerTest, AloneSeesTheMeanBehindEachBackward) {
  run_ranks(2, [&](comm::World& world) {
    auto linear = make_linear();
    Optimizer<SGD> optimizer(linear->parameters(), world, SGDOptions(1.0), options());
    backward(linear, world.rank());
    EXPECT_EQ(linear->weight.grad()[0][0].item<double>(), 0.5);
    backward(linear, world.rank());
    EXPECT_EQ(linear->weight.grad()[0][0].item<double>(), 1.0);
    linear->weight.mutable_grad().mul_(0.5);
    optimizer.step();
    EXPECT_EQ(linear->weight[0][0].item<double>(), 0.5);
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, OptimizerTest, ::testing::Values(0, 1));

TEST(OptimizerErrorTest, RefusesParametersThatWereNotWrapped) {
  run_ranks(1, [](comm::World& world) {
    DistributedDataParallel<torch::nn::Linear> model(make_linear(), world);
    auto other = make_linear();
    EXPECT_THAT(
        [&] { Optimizer<SGD>(model, {group({other->weight}, 1.0)}, SGDOptions(9.0)); },
        ::testing::Throws<c10::Error>(::testing::Property(
            &c10::Error::what_without_backtrace,
            ::testing::HasSubstr("parameter 0 of group 0 (sizes [7, 7]) is not a parameter"))));
  });
}

TEST(OptimizerErrorTest, RefusesOptionsThatTheAlgorithmRefuses) {
  run_ranks(2, [](comm::World& world) {
    DistributedDataParallel<torch::nn::Linear> model(make_linear(), world);
    EXPECT_THROW(Optimizer<AdamW>(model, AdamWOptions(std::nan(""))), c10::Error);
    EXPECT_THROW(Optimizer<AdamW>(model, AdamWOptions(-1.0)), c10::Error);
  });
}

TEST(OptimizerErrorTest, NamesOptionsThatDifferBetweenRanks) {
  const auto errors = try_ranks(2, [](comm::World& world) {
    DistributedDataParallel<torch::nn::Linear> model(make_linear(), world);
    Optimizer<AdamW> optimizer(model, AdamWOptions(world.rank() == 0 ? 0.1 : 0.2));
  });
  EXPECT_THAT(message_of(errors[0]),
              ::testing::HasSubstr("rank 0 has group 0 lr: 0.1; rank 1 has group 0 lr: 0.2"));
  const auto betas = try_ranks(2, [](comm::World& world) {
    DistributedDataParallel<torch::nn::Linear> model(make_linear(), world);
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.1).eps(world.rank() == 0 ? 1e-8 : 1e-7));
  });
  EXPECT_THAT(message_of(betas[1]), ::testing::HasSubstr("rank 0 has group 0 eps: 1e-08; "));
}

TEST(OptimizerErrorTest, RefusesToBeSavedAsOneArchive) {
  run_ranks(1, [](comm::World& world) {
    DistributedDataParallel<torch::nn::Linear> model(make_linear(), world);
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    std::ostringstream out;
    EXPECT_THROW(torch::save(optimizer, out), c10::Error);
  });
}

}  // namespace
}  // namespace zeropage::optimizer_test
