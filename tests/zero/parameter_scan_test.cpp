// Looks at so many parameters that several threads share them.
#include "zero/parameter_scan.h"

#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/optim/adamw.h>

#include "tests/harness/errors.h"
#include "zeropage/zeropage.h"

namespace zeropage::parameter_scan_test {
namespace {

constexpr int64_t kTensors = 4 * zero::kParametersOfThread + 7;
constexpr int64_t kNumel = 3;

TEST(ParameterScanTest, EachParameterIsSeenOnce) {
  std::vector<int> seen(kTensors);
  zero::for_each_in_parallel(seen.size(), [&](size_t i) { ++seen[i]; });
  EXPECT_EQ(seen, std::vector<int>(kTensors, 1));
}

TEST(ParameterScanTest, FindsTheFirstOneWhicheverThreadIsFaster) {
  constexpr size_t kCount = kTensors;
  for (const size_t first : {size_t{0}, kCount / 2, kCount - 2}) {
    EXPECT_EQ(zero::first_in_parallel(kCount, [=](size_t i) { return i >= first; }), first);
  }
  EXPECT_EQ(zero::first_in_parallel(kCount, [](size_t) { return false; }), kCount);
  EXPECT_EQ(zero::first_in_parallel(0, [](size_t) { return true; }), 0U);
}

struct ManyParametersImpl : torch::nn::Module {
  ManyParametersImpl() {
    for (int64_t i = 0; i < kTensors; ++i) {
      register_parameter("weight" + std::to_string(i), torch::full({kNumel}, 1.0));
    }
  }
  torch::Tensor forward() const {
    std::vector<torch::Tensor> sums;
    for (const torch::Tensor& parameter : parameters()) sums.push_back(parameter.square().sum());
    return torch::stack(sums).sum();
  }
};
TORCH_MODULE(ManyParameters);

class ManyParametersTest : public ::testing::TestWithParam<int> {
 protected:
  using AdamW = torch::optim::AdamW;

  ManyParametersTest()
      : model_(ManyParameters(), World::from_environment(), {.stage = stage_of(GetParam())}),
        optimizer_(model_, torch::optim::AdamWOptions(0.1)) {
    at::set_num_threads(4);
  }
  ~ManyParametersTest() override { at::set_num_threads(threads_); }

  void backward() {
    optimizer_.zero_grad();
    model_().backward();
  }
  torch::Tensor parameter(int64_t i) {
    return model_.module()->parameters()[static_cast<size_t>(i)];
  }
  torch::Tensor values(int64_t i) {
    const GatheredParameters guard(model_);
    return parameter(i).detach().clone();
  }

  const int threads_ = at::get_num_threads();
  DistributedDataParallel<ManyParameters> model_;
  Optimizer<AdamW> optimizer_;
};

TEST_P(ManyParametersTest, EachIsSteppedOnceAndCountsOneVersion) {
  const auto before = parameter(kTensors - 1)._version();
  backward();
  optimizer_.step();
  for (const int64_t i : {int64_t{0}, zero::kParametersOfThread, kTensors - 1}) {
    EXPECT_NEAR(values(i)[0].item<double>(), 0.9 - 0.1 * 1e-2, 1e-6) << i;
  }
  EXPECT_EQ(parameter(kTensors - 1)._version() - before, 1);
}

TEST_P(ManyParametersTest, AGradientThatAScriptPutThereIsStepped) {
  backward();
  const int64_t late = kTensors - 2;
  parameter(late).mutable_grad() = torch::full({kNumel}, -1.0);
  parameter(1).mutable_grad() = torch::Tensor();
  optimizer_.step();
  EXPECT_GT(values(late)[0].item<double>(), 1);
  EXPECT_EQ(values(1)[0].item<double>(), 1);
  EXPECT_LT(values(0)[0].item<double>(), 1);
}

// LibTorch itself refuses other memory for a parameter that has none.
class ManyWholeParametersTest : public ManyParametersTest {};

TEST_P(ManyWholeParametersTest, TheFirstOneWithOtherMemoryIsNamed) {
  backward();
  for (const int64_t i : {kTensors - 1, 2 * zero::kParametersOfThread + 1}) {
    parameter(i).set_data(torch::ones({kNumel}));
  }
  const std::string error = testing::error_of([&] { optimizer_.step(); });
  EXPECT_NE(error.find("\"weight" + std::to_string(2 * zero::kParametersOfThread + 1) + "\""),
            std::string::npos)
      << error;
}

TEST_P(ManyParametersTest, AChangeOfOneEntryOfTheStateIsRefused) {
  backward();
  optimizer_.step();
  torch::optim::Optimizer& base = optimizer_;
  auto& entry = base.state().at(parameter(kTensors - 1).unsafeGetTensorImpl());
  static_cast<torch::optim::AdamWParamState&>(*entry).step(0);
  backward();
  EXPECT_NE(testing::error_of([&] { optimizer_.step(); }).find("state()"), std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(AtStages, ManyParametersTest, ::testing::Values(0, 1, 2, 3));
INSTANTIATE_TEST_SUITE_P(AtStages, ManyWholeParametersTest, ::testing::Values(0, 1, 2));

}  // namespace
}  // namespace zeropage::parameter_scan_test
