// A list of experts of which each rank runs others, at every stage beside plain LibTorch.
#include "zeropage/touch_all.h"

#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "zeropage/zeropage.h"

namespace zeropage::touch_all_test {
namespace {

using namespace zeropage::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;
using memory::operator""_KiB;
using torch::Tensor;
using torch::optim::SGD;
using torch::optim::SGDOptions;

constexpr int64_t kWidth = 6;
constexpr size_t kExperts = 5;

// Larger than a page.
struct ExpertImpl : torch::nn::Module {
  ExpertImpl() {
    up = register_module("up", torch::nn::Linear(kWidth, 40));
    down = register_module("down", torch::nn::Linear(40, kWidth));
  }
  Tensor forward(const Tensor& x) { return down(torch::gelu(up(x))); }
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Expert);

enum class How { kTouchAll, kInARegion, kWithoutIt, kNoRows };

// Which experts a rank runs, and in which order. Some run none.
using Chosen = std::vector<size_t>;
Chosen chosen_of(int rank, int step) {
  const auto first = static_cast<size_t>(3 * rank + step);
  if (first % 4 == 3) return {};
  if (first % 2 == 0) return {first % kExperts, (first + 3) % kExperts};
  return {(first + 1) % kExperts};
}

struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(kWidth, kWidth));
    for (const char* name : {"lower", "upper"}) {
      torch::nn::ModuleList list;
      for (size_t expert = 0; expert < kExperts; ++expert) list->push_back(Expert());
      lists.push_back(register_module(name, list));
    }
    gates = register_parameter("gates", torch::rand({kExperts}));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    last = register_module("last", torch::nn::Linear(kWidth, kWidth));
  }

  // Not through x alone: gates have a gradient of their own.
  Tensor routed(torch::nn::ModuleList list, const Tensor& x, const Chosen& chosen,
                const Tensor& weights) {
    Tensor sum = torch::zeros_like(x);
    for (const size_t expert : chosen) {
      sum = sum + list[expert]->as<Expert>()->forward(x) * weights[static_cast<int64_t>(expert)];
    }
    return sum;
  }

  Tensor forward(Tensor x, const Chosen& chosen, How how) {
    x = torch::tanh(first(x));
    const Tensor weights = gates * 1.0;  // an operator on a sharded parameter, on all ranks
    for (const auto& list : lists) {
      const auto experts = [&](const Tensor& input) {
        return routed(list, input, chosen, weights);
      };
      Tensor y;
      if (how == How::kWithoutIt) {
        y = experts(x);
      } else if (how == How::kInARegion) {
        // By value: it is run again in backward.
        const auto again = [this, list, chosen](const Tensor& x, const Tensor& weights) {
          return touch_all(list, norm(x), [&](const Tensor& input) {
            return routed(list, input, chosen, weights);
          });
        };
        y = checkpoint(again, x, weights);
      } else {
        y = touch_all(list, norm(x), experts);
      }
      x = x + y;
    }
    return last(x);
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  std::vector<torch::nn::ModuleList> lists;
  Tensor gates;
};
TORCH_MODULE(Net);

Net make_net() {
  static std::mutex generator;
  const std::lock_guard lock(generator);
  torch::manual_seed(5);
  Net net;
  net->to(torch::kDouble);
  return net;
}

Tensor batch_of(int rank, int step) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(100 * step + rank));
  return torch::randn({3, kWidth}, generator, torch::kDouble);
}

std::vector<Tensor> plainly_trained(int ranks, int steps) {
  Net net = make_net();
  SGD optimizer(net->parameters(), SGDOptions(0.05).momentum(0.9));
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    for (int rank = 0; rank < ranks; ++rank) {
      const Tensor y = net(batch_of(rank, step), chosen_of(rank, step), How::kTouchAll);
      (y.square().mean() / ranks).backward();
    }
    optimizer.step();
  }
  return net->parameters();
}

using Setting = std::tuple<int, int, How>;
class TouchAllTest : public ::testing::TestWithParam<Setting> {};

TEST_P(TouchAllTest, LetsRanksRunOtherModulesAndTrainsAsPlainLibTorch) {
  const auto [stage, ranks, how] = GetParam();
  constexpr int kSteps = 8;
  const std::vector<Tensor> expected = plainly_trained(ranks, kSteps);
  run_ranks(ranks, [&, stage = stage, how = how](World& world) {
    Options options;
    options.stage = stage_of(stage);
    options.page_bytes = 4_KiB;
    options.update_by = UpdateBy::kClass;
    DistributedDataParallel<Net> model(make_net(), world, options);
    Optimizer<SGD> optimizer(model, SGDOptions(0.05).momentum(0.9));
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      const Tensor x = batch_of(world.rank(), step);
      const Chosen chosen = chosen_of(world.rank(), step);
      if (step % 3 == 1) {
        const torch::NoGradGuard no_grad;
        model(x, chosen, how);
      }
      model(x, chosen, how).square().mean().backward();
      for (const auto& list : model->lists) {
        for (const auto& parameter : list->parameters()) EXPECT_TRUE(parameter.grad().defined());
      }
      optimizer.step();
    }
    const GatheredParameters gathered(model);
    const std::vector<Tensor> actual = model.module()->parameters();
    for (size_t i = 0; i < actual.size(); ++i) {
      EXPECT_LE((actual[i].detach() - expected[i].detach()).abs().max().item<double>(), 1e-12) << i;
    }
  });
}

std::string name_of(const ::testing::TestParamInfo<Setting>& info) {
  return c10::str("AtStage", std::get<0>(info.param), "On", std::get<1>(info.param), "Ranks",
                  std::get<2>(info.param) == How::kInARegion ? "InARegion" : "Plainly");
}
INSTANTIATE_TEST_SUITE_P(Stages, TouchAllTest,
                         ::testing::Combine(::testing::Values(0, 1, 2, 3),
                                            ::testing::Values(1, 2, 3, 4),
                                            ::testing::Values(How::kTouchAll, How::kInARegion)),
                         name_of);

TEST(TouchAllTest, IsNamedWhereRanksRunOtherModulesWithoutIt) {
  const auto errors = try_ranks(2, [](World& world) {
    Options options;
    options.stage = stage_of(3);
    options.page_bytes = 4_KiB;
    DistributedDataParallel<Net> model(make_net(), world, options);
    const Chosen chosen = world.rank() == 0 ? Chosen{0, 1, 2} : Chosen{3, 4};
    model(batch_of(world.rank(), 0), chosen, How::kWithoutIt).sum().backward();
  });
  EXPECT_THAT(message_of(errors[0]),
              AllOf(HasSubstr("out of step"), HasSubstr("zeropage::touch_all()")));
}

TEST(TouchAllTest, IsRefusedUnderARecomputeWhereParametersAreSharded) {
  run_ranks(2, [](World& world) {
    for (const int stage : {2, 3}) {
      Options options;
      options.stage = stage_of(stage);
      DistributedDataParallel<Net> model(make_net(), world, options);
      Recompute recompute(RecomputeOptions::selective());
      const ActivationScope scope(recompute);
      const std::string error = error_of([&] {
        model(batch_of(0, 0), Chosen{0, 1}, How::kTouchAll);
      });
      EXPECT_THAT(error, HasSubstr(stage == 3 ? "expected no Recompute around" : ""));
      EXPECT_EQ(error.empty(), stage == 2);
    }
  });
}

TEST(TouchAllTest, GivesZerosToWhatNobodyUsesAndPassesInfinitiesOn) {
  torch::nn::ModuleList list;
  for (size_t expert = 0; expert < kExperts; ++expert) list->push_back(Expert());
  {
    const torch::NoGradGuard no_grad;
    list[1]->as<Expert>()->up->weight.fill_(INFINITY);
  }
  const Tensor x = torch::full({2, kWidth}, INFINITY).requires_grad_();
  const Tensor y = touch_all(list, x, [](const Tensor& input) { return input * 2; });
  EXPECT_TRUE(torch::equal(y, x));
  y.sum().backward();
  EXPECT_TRUE(x.grad().eq(2).all().item<bool>());
  for (const Tensor& parameter : list->parameters()) {
    ASSERT_TRUE(parameter.grad().defined());
    EXPECT_TRUE(parameter.grad().eq(0).all().item<bool>());
  }
}

TEST(TouchAllTest, LetsPagesGoAfterAnErrorAndAfterGradientsOfInnerTensorsAlone) {
  run_ranks(2, [](World& world) {
    Options options;
    options.stage = stage_of(3);
    DistributedDataParallel<Net> model(make_net(), world, options);
    Optimizer<SGD> optimizer(model, SGDOptions(0.05));
    torch::nn::ModuleList list = model->lists[0];
    const Tensor x = batch_of(0, 0);
    EXPECT_THAT(error_of([&] { touch_all(list, x, [](const Tensor&) { return Tensor(); }); }),
                HasSubstr("expected the function to return a tensor"));
    EXPECT_THAT(error_of([&] {
                  touch_all(list, x,
                            [](const Tensor&) -> Tensor { throw std::runtime_error("no"); });
                }),
                HasSubstr("no"));
    Tensor inner;
    const Tensor y = touch_all(list, x, [&](const Tensor& input) {
      inner = list[0]->as<Expert>()->forward(input);
      return inner * inner;
    });
    torch::autograd::grad({y.sum()}, {inner});
    optimizer.step();  // throws where a page is kept
  });
}

}  // namespace
}  // namespace zeropage::touch_all_test
