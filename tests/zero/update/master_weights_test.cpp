// fp32 master weights behind parameters in a lower precision.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/errors.h"
#include "tests/harness/mixed_precision_reference.h"
#include "tests/harness/ranks.h"
#include "tests/harness/tiny_models.h"
#include "zero/setup/sharded_model.h"
#include "zeropage/testing.h"
#include "zeropage/zeropage.h"

namespace zeropage::master_weights_test {
namespace {

using namespace zeropage::testing;
using memory::Kind;
using memory::operator""_KiB;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

constexpr int kSteps = 4;

template <typename Module>
Module make_low(torch::ScalarType dtype) {
  Module module = make<Module>();
  module->to(dtype);
  return module;
}

class MasterWeightsTest : public ::testing::TestWithParam<std::tuple<int, int, torch::ScalarType>> {
 protected:
  int ranks() const { return std::get<0>(GetParam()); }
  torch::ScalarType dtype() const { return std::get<2>(GetParam()); }
  Options options() const {
    Options options;
    options.stage = stage_of(std::get<1>(GetParam()));
    options.page_bytes = 4_KiB;
    options.low_precision_update = LowPrecisionUpdate::kMasterWeights;
    return options;
  }
  void train(DistributedDataParallelBase& model, torch::optim::Optimizer& optimizer,
             const std::function<torch::Tensor(const torch::Tensor&)>& forward, int step) const {
    const Samples samples = samples_in(model.world().rank(), step, dtype());
    optimizer.zero_grad();
    loss_of(forward(samples.inputs), samples).backward();
    optimizer.step();
  }
};

TEST_P(MasterWeightsTest, AreWhatTheClassUpdatesAndRoundIntoTheParameters) {
  at::set_num_threads(1);
  const auto expected = train_reference_in<Oddball>(
      {.ranks = ranks(), .dtype = dtype(), .masters = MastersBegin::kRounded});
  run_ranks(ranks(), [&](comm::World& world) {
    DistributedDataParallel<Oddball> model(make_low<Oddball>(dtype()), world, options());
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    for (int step = 0; step < kSteps; ++step) {
      train(
          model, optimizer, [&](const auto& x) { return model(x); }, step);
    }
    EXPECT_TRUE(same_bits(expected, model.parameters())) << "rank " << world.rank();
  });
}

TEST_P(MasterWeightsTest, KeepUpdatesThatAreTooSmallForTheParameters) {
  run_ranks(ranks(), [&](comm::World& world) {
    DistributedDataParallel<torch::nn::Linear> model(make_low<Oddball>(dtype())->first, world,
                                                     options());
    {
      const torch::NoGradGuard no_grad;
      model->weight.fill_(1.0);
    }
    // 1 - 2^-11 is 1 in both low precisions, rounded; after eight steps it is less.
    Optimizer<torch::optim::SGD> optimizer(model, torch::optim::SGDOptions(1.0 / 2048));
    for (int step = 0; step < 8; ++step) {
      optimizer.zero_grad();
      model->weight.sum().backward();
      optimizer.step();
      if (step == 0) {
        EXPECT_TRUE(model->weight.eq(1.0).all().item<bool>() || dtype() == torch::kHalf);
      }
    }
    const float expected =
        torch::full({}, 1.0 - 8.0 / 2048).to(dtype()).to(torch::kFloat).item<float>();
    EXPECT_TRUE(model->weight.to(torch::kFloat).eq(expected).all().item<bool>());
  });
}

TEST_P(MasterWeightsTest, TakeOverWhatIsWrittenToParameters) {
  run_ranks(ranks(), [&](comm::World& world) {
    DistributedDataParallel<torch::nn::Linear> model(make_low<Oddball>(dtype())->first, world,
                                                     options());
    Optimizer<torch::optim::SGD> optimizer(model, torch::optim::SGDOptions(0.5));
    const auto step = [&] {
      optimizer.zero_grad();
      model->weight.sum().backward();
      optimizer.step();
    };
    step();
    {
      const torch::NoGradGuard no_grad;
      model->weight.fill_(4.0);
    }
    step();
    EXPECT_TRUE(model->weight.eq(3.5).all().item<bool>()) << model->weight;
  });
}

TEST_P(MasterWeightsTest, CostFourBytesForEachElementThatThisRankOwns) {
  run_ranks(ranks(), [&](comm::World& world) {
    DistributedDataParallel<Oddball> model(make_low<Oddball>(dtype()), world, options());
    const zero::ParameterPages& pages = *sharded_parameters_of(model).pages;
    int64_t expected = 0;
    for (size_t page = 0; page < pages.layouts().size(); ++page) {
      if (pages.layouts()[page].requires_grad) expected += 4 * pages.owned(page).numel();
    }
    EXPECT_KIND_BYTES_EQ(*memory::Ledger::current(), Kind::kMasterWeights, expected);
  });
}

INSTANTIATE_TEST_SUITE_P(RanksStagesDtypes, MasterWeightsTest,
                         ::testing::Combine(::testing::Values(1, 2, 3),
                                            ::testing::Values(0, 1, 2, 3),
                                            ::testing::Values(torch::kBFloat16, torch::kHalf)),
                         [](const auto& info) {
                           return c10::str("Ranks", std::get<0>(info.param), "Stage",
                                           std::get<1>(info.param), std::get<2>(info.param));
                         });

TEST(MasterWeightsTest, AreNotMadeForParametersInFullPrecision) {
  run_ranks(1, [](comm::World& world) {
    Options options;
    options.low_precision_update = LowPrecisionUpdate::kMasterWeights;
    const DistributedDataParallel<torch::nn::Linear> model(torch::nn::Linear(7, 7), world, options);
    EXPECT_KIND_BYTES_EQ(*memory::Ledger::current(), Kind::kMasterWeights, 0);
  });
}

}  // namespace
}  // namespace zeropage::master_weights_test
