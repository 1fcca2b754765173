// Blocks of a module that are computed again, all but their inputs.
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/harness/errors.h"
#include "tests/harness/limited_models.h"
#include "zeropage/activation_offload.h"
#include "zeropage/ledger.h"
#include "zeropage/recompute.h"

namespace zeropage::checkpointing::blocks_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using zeropage::testing::error_of;
using zeropage::testing::limited_models;
using zeropage::testing::Net;

// A block that begins with operators that take no parameter, as a norm written by hand does, and ends with them.
struct HandNormImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    const auto normed = x * torch::rsqrt(x.square().mean({-1}, true) + 1e-6) * scale;
    return x + torch::dropout(down(torch::silu(up(normed))), 0.2, is_training());
  }
  torch::Tensor scale = register_parameter("scale", torch::ones({64}));
  torch::nn::Linear up = register_module("up", torch::nn::Linear(64, 256));
  torch::nn::Linear down = register_module("down", torch::nn::Linear(256, 64));
};
TORCH_MODULE(HandNorm);

struct HandMade : Net {
  HandMade() {
    for (int i = 0; i < 5; ++i) blocks->push_back(HandNorm());
  }
  torch::Tensor forward(const torch::Tensor& x) override {
    torch::Tensor y = torch::tanh(first(x));
    for (const auto& block : *blocks) y = block->as<HandNorm>()->forward(y);
    return last(y);
  }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(64, 64));
  torch::nn::ModuleList blocks = register_module("blocks", torch::nn::ModuleList());
  torch::nn::Linear last = register_module("last", torch::nn::Linear(64, 8));
};

// A block whose last operator saves its own result for backward, before the next block has read it.
struct SaturatedImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return torch::tanh(layer(torch::sin(x))); }
  torch::nn::Linear layer = register_module("layer", torch::nn::Linear(64, 64));
};
TORCH_MODULE(Saturated);

struct SaturatedNet : Net {
  explicit SaturatedNet(int count) {
    for (int i = 0; i < count; ++i) blocks->push_back(Saturated());
  }
  torch::Tensor forward(const torch::Tensor& x) override {
    torch::Tensor y = x;
    for (const auto& block : *blocks) y = block->as<Saturated>()->forward(y);
    return y;
  }
  torch::nn::ModuleList blocks = register_module("blocks", torch::nn::ModuleList());
};

class BlocksTest : public ::testing::Test {
 protected:
  BlocksTest() { at::set_num_threads(1); }

  struct Step {
    std::vector<torch::Tensor> gradients;
    int64_t kept = 0;  // bytes of activations when forward has ended
    int64_t peak = 0;
  };

  Step step(Net& net, const torch::Tensor& x, Recompute* recompute) const {
    torch::manual_seed(7);
    net.zero_grad(true);
    const int64_t before = ledger_->now().activations();
    ledger_->reset_peak();
    torch::Tensor loss;
    {
      std::optional<ActivationScope> scope;
      if (recompute != nullptr) scope.emplace(*recompute);
      loss = net.forward(x).square().mean();
    }
    Step step{.kept = ledger_->now().activations() - before};
    loss.backward();
    step.peak = ledger_->activation_peak() - before;
    for (const auto& parameter : net.parameters()) step.gradients.push_back(parameter.grad());
    return step;
  }

  static void expect_same(const Step& expected, const Step& got) {
    ASSERT_EQ(expected.gradients.size(), got.gradients.size());
    for (size_t index = 0; index < got.gradients.size(); ++index) {
      EXPECT_TRUE(torch::equal(expected.gradients[index], got.gradients[index])) << index;
    }
  }

  void expect_bits_and_less(Net& net, const torch::Tensor& x) const {
    const Step plain = step(net, x, nullptr);
    Recompute selective(RecomputeOptions::selective());
    const Step by_operators = step(net, x, &selective);
    Recompute by_blocks(RecomputeOptions::by_blocks(find_blocks(net)));
    for (int times = 0; times < 2; ++times) {
      const Step of_blocks = step(net, x, &by_blocks);
      expect_same(plain, of_blocks);
      EXPECT_LT(of_blocks.kept, by_operators.kept);
      EXPECT_LT(of_blocks.peak, plain.peak);
    }
    Recompute nothing(RecomputeOptions::nothing());
    const Step kept = step(net, x, &nothing);
    expect_same(plain, kept);
    EXPECT_EQ(kept.kept, plain.kept);
  }

  const std::shared_ptr<memory::Ledger> ledger_ = std::make_shared<memory::Ledger>();
  const memory::LedgerScope scope_{ledger_};
};

TEST_F(BlocksTest, OfTransformersGiveThePlainBitsAndKeepLess) {
  for (const auto& model : limited_models()) {
    if (std::string(model.name) != "GPT" && std::string(model.name) != "Llama") continue;
    SCOPED_TRACE(model.name);
    const auto net = model.make();
    expect_bits_and_less(*net, model.samples);
  }
}

TEST_F(BlocksTest, MayBeginAndEndWithOperatorsWithoutParametersAndDrawNumbers) {
  torch::manual_seed(1);
  HandMade net;
  expect_bits_and_less(net, torch::randn({64, 64}));
}

// Five blocks of which four are dropped: what is kept grows by a block's input and no more.
TEST_F(BlocksTest, KeepTheirInputsAndTheLastBlock) {
  torch::manual_seed(1);
  HandMade net;
  const torch::Tensor x = torch::randn({256, 64});
  const int64_t row = 256 * 4;  // bytes of a column of all samples
  const auto kept_with = [&](int blocks) {
    net.blocks = torch::nn::ModuleList();
    for (int i = 0; i < blocks; ++i) net.blocks->push_back(HandNorm());
    net.replace_module("blocks", net.blocks);
    Recompute recompute(RecomputeOptions::by_blocks(find_blocks(net)));
    return step(net, x, &recompute).kept;
  };
  const int64_t five = kept_with(5), eight = kept_with(8);
  EXPECT_GE(eight - five, 3 * 64 * row);
  // And the squares' sums of each row, which are small, and a normed input.
  EXPECT_LE(eight - five, 3 * (2 * 64 + 4) * row);
}

// Without its input a block would be computed again from the first one's.
TEST_F(BlocksTest, KeepAnInputThatTheBlockBeforeHadSavedAndDropped) {
  torch::manual_seed(1);
  const torch::Tensor x = torch::randn({256, 64});
  const int64_t input = x.numel() * 4;  // bytes
  const auto kept_with = [&](int blocks) {
    SaturatedNet net(blocks);
    Recompute recompute(RecomputeOptions::by_blocks(find_blocks(net)));
    const Step of_blocks = step(net, x, &recompute);
    expect_same(step(net, x, nullptr), of_blocks);
    return of_blocks.kept;
  };
  EXPECT_EQ(kept_with(8) - kept_with(5), 3 * input);
}

TEST_F(BlocksTest, AreThoseOfTheListWithMostParameters) {
  HandMade net;
  const ModuleBlocks found = find_blocks(net);
  EXPECT_THAT(found.lists, ElementsAre("blocks"));
  EXPECT_EQ(found.parameters.size(), 5U);
  EXPECT_EQ(found.to_string(), "the 5 of \"blocks\"");
  EXPECT_EQ(find_blocks(net, {"blocks"}).parameters.size(), 5U);
  torch::nn::Sequential itself;
  for (int i = 0; i < 2; ++i) itself->push_back(HandNorm());
  EXPECT_EQ(find_blocks(*itself).to_string(), "the 2 of the module itself");
}

TEST_F(BlocksTest, AreAskedForByNameWhereItIsNotClearWhichTheyAre) {
  struct Two : torch::nn::Module {
    Two() {
      for (const char* name : {"encoder", "decoder"}) {
        torch::nn::ModuleList list;
        for (int i = 0; i < 3; ++i) list->push_back(HandNorm());
        register_module(name, list);
      }
    }
  } two;
  const std::string error = error_of([&] { find_blocks(two); });
  EXPECT_THAT(error, HasSubstr("expected one list with more than half of the parameters, got "
                               "\"encoder\" (50 % of the parameters), \"decoder\" (50 %"));
  EXPECT_THAT(error, HasSubstr("find_blocks(module, {\"NAME\"})"));
  EXPECT_THAT(error, HasSubstr("FitOptions::blocks = {\"NAME\"}"));
  const ModuleBlocks both = find_blocks(two, {"encoder", "decoder"});
  EXPECT_EQ(both.parameters.size(), 6U);
  EXPECT_EQ(both.to_string(), "the 6 of \"encoder\", \"decoder\"");
  EXPECT_THAT(error_of([&] { find_blocks(two, {"layers"}); }),
              HasSubstr("got \"layers\"; this module has \"encoder\", \"decoder\""));
  torch::nn::Sequential layers(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
  EXPECT_THAT(error_of([&] { find_blocks(*layers); }), HasSubstr("this module has none"));
}

TEST_F(BlocksTest, AreRefusedBesideABudget) {
  HandMade net;
  RecomputeOptions options = RecomputeOptions::by_blocks(find_blocks(net));
  options.budget_bytes = 1 << 20;
  EXPECT_THAT(error_of([&] { Recompute recompute(options); }), HasSubstr("got both"));
}

TEST_F(BlocksTest, LeaveTheirInputsToAnOffloadAroundThem) {
  torch::manual_seed(1);
  HandMade net;
  const torch::Tensor x = torch::randn({64, 64});
  const Step plain = step(net, x, nullptr);
  ActivationOffload offload({.least_bytes = 0});
  Recompute recompute(RecomputeOptions::by_blocks(find_blocks(net)));
  Step both;
  {
    const ActivationScope around(offload);
    torch::manual_seed(7);
    net.zero_grad(true);
    torch::Tensor loss;
    {
      const ActivationScope scope(recompute);
      loss = net.forward(x).square().mean();
    }
    loss.backward();
  }
  for (const auto& parameter : net.parameters()) both.gradients.push_back(parameter.grad());
  expect_same(plain, both);
  EXPECT_GT(offload.statistics().copies, 0);
}

}  // namespace
}  // namespace zeropage::checkpointing::blocks_test
