#include "zeropage/tiled.h"

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/harness/accumulated.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "zeropage/zeropage.h"

namespace zeropage::tiled_test {
namespace {

using namespace zeropage::testing;
using memory::operator""_KiB;
using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;

struct GatedImpl : torch::nn::Module {
  GatedImpl(int64_t width, int64_t hidden)
      : gate(register_module("gate", torch::nn::Linear(width, hidden))),
        up(register_module("up", torch::nn::Linear(width, hidden))),
        down(register_module("down", torch::nn::Linear(hidden, width))) {}
  Tensor forward(const Tensor& x) { return down(torch::silu(gate(x)) * up(x)); }
  torch::nn::Linear gate, up, down;
};
TORCH_MODULE(Gated);

std::function<Tensor(const Tensor&)> function_of(const Gated& mlp) {
  return [mlp = mlp.ptr()](const Tensor& x) { return mlp->forward(x); };
}

// The result, and gradients of its sum of squares for x and the weights.
std::vector<Tensor> seen(Gated& mlp, const Tensor& input,
                         const std::function<Tensor(const Tensor&)>& run) {
  mlp->zero_grad();
  const Tensor x = input.detach().clone().requires_grad_();
  const Tensor y = run(x);
  y.square().sum().backward();
  std::vector<Tensor> all{y.detach(), x.grad()};
  for (const Tensor& parameter : mlp->parameters()) all.push_back(parameter.grad().clone());
  return all;
}

void expect_close(const std::vector<Tensor>& expected, const std::vector<Tensor>& got) {
  ASSERT_EQ(expected.size(), got.size());
  for (size_t index = 0; index < expected.size(); ++index) {
    EXPECT_TRUE(torch::allclose(expected[index], got[index], 1e-12, 1e-12)) << "tensor " << index;
  }
}

TEST(TiledTest, HasTheValuesAndGradientsOfTheFunctionAtOnce) {
  Gated mlp(6, 10);
  mlp->to(torch::kDouble);
  const auto options = torch::dtype(torch::kDouble);
  // Also tokens that the tiles do not divide, another layout, and fewer tokens than a tile.
  for (const Tensor& x : {torch::randn({11, 6}, options), torch::randn({3, 7, 6}, options),
                          torch::randn({7, 3, 6}, options).transpose(0, 1),
                          torch::randn({2, 2, 5, 6}, options), torch::randn({1, 1, 6}, options)}) {
    const auto expected = seen(mlp, x, function_of(mlp));
    for (const int64_t tokens : {0, 1, 3, 4, 100}) {
      SCOPED_TRACE(c10::str(x.sizes(), " in tiles of ", tokens));
      expect_close(expected, seen(mlp, x, [&](const Tensor& x) {
                     return tiled(mlp, x, {.tokens = tokens});
                   }));
    }
  }
}

TEST(TiledTest, CutsIntoTilesThatDifferByATokenAtMost) {
  std::vector<int64_t> sizes;
  const torch::nn::Module no_weights;
  const auto note = [&](const Tensor& x) {
    sizes.push_back(x.size(-2));
    return x * 2;
  };
  const torch::NoGradGuard no_grad;
  const auto tiles = [&](at::IntArrayRef of, int64_t tokens) {
    sizes.clear();
    tiled(no_weights, torch::zeros(of), note, {.tokens = tokens});
    return sizes;
  };
  using Sizes = std::vector<int64_t>;
  EXPECT_EQ(tiles({10, 4}, 4), (Sizes{4, 3, 3}));
  EXPECT_EQ(tiles({2, 10, 4}, 4), (Sizes{2, 2, 2, 2, 2}));  // two samples have four tokens
  EXPECT_EQ(tiles({8, 3, 4}, 4), (Sizes{1, 1, 1}));         // never less than a token of each
  EXPECT_EQ(tiles({0, 4}, 4), (Sizes{0}));
  EXPECT_EQ(tiles({2, 0, 4}, 4), (Sizes{0}));
  EXPECT_EQ(tiles({1500, 4}, 0), (Sizes{500, 500, 500}));
  EXPECT_EQ(tiles({1500, 750}, 0), (Sizes{750, 750}));
}

TEST(TiledTest, WithinARegionAndUnderAutocastIsTheSameAgain) {
  Gated mlp(8, 16);
  const Tensor x = torch::randn({20, 8});
  const auto in_tiles = [&](const Tensor& x) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const Tensor y = tiled(mlp, x, {.tokens = 5});
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    return y;
  };
  const auto once = seen(mlp, x, in_tiles);
  EXPECT_EQ(once.front().scalar_type(), torch::kBFloat16);
  const auto again =
      seen(mlp, x, [&](const Tensor& x) { return checkpointing::checkpoint(in_tiles, x); });
  for (size_t index = 0; index < once.size(); ++index) {
    EXPECT_TRUE(torch::equal(once[index], again[index])) << "tensor " << index;
  }
}

TEST(TiledTest, DropoutWithinATileHasTheSameMaskInBackward) {
  const torch::nn::Module no_weights;
  const auto drop = [](const Tensor& x) { return at::dropout(x, 0.5, /*train=*/true); };
  const Tensor x = torch::ones({64, 4}).requires_grad_();
  const Tensor y = tiled(no_weights, x, drop, {.tokens = 8});
  y.sum().backward();
  EXPECT_TRUE(torch::equal(y.detach(), x.grad()));
}

// A region without a gradient says so, once for each tile.
TEST(TiledTest, WhereNothingAsksForAGradientMakesNoRegion) {
  Gated mlp(6, 10);
  const auto regions_of = [&](const Tensor& x) {
    const int64_t before = checkpointing::recompute_statistics().forwards;
    tiled(mlp, x, {.tokens = 2});
    return checkpointing::recompute_statistics().forwards - before;
  };
  const Tensor x = torch::randn({6, 6});
  EXPECT_EQ(regions_of(x), 3);
  for (Tensor& parameter : mlp->parameters()) parameter.set_requires_grad(false);
  EXPECT_EQ(regions_of(x), 0);
  EXPECT_EQ(regions_of(x.clone().requires_grad_()), 3);
}

// x, the hidden activations that LibTorch keeps (the gate, its silu, the other factor and the product), in fp32.
TEST(TiledTest, KeepsItsInputAndComputesOneTileAtATime) {
  constexpr int64_t kTokens = 512, kWidth = 16, kHidden = 256, kTile = 64;
  memory::Ledger& ledger = *memory::Ledger::current();
  Gated mlp(kWidth, kHidden);
  const Tensor x = torch::randn({kTokens, kWidth}).requires_grad_();
  const int64_t hidden = kTokens * kHidden * 4, narrow = kTokens * kWidth * 4;
  const int64_t weights = 3 * kWidth * kHidden * 4 + 3 * kHidden * 4;
  const auto kept_and_peak = [&](const std::function<Tensor(const Tensor&)>& run) {
    mlp->zero_grad();
    x.mutable_grad() = Tensor();
    const int64_t base = ledger.now().activations();
    const Tensor y = run(x);
    const int64_t kept = ledger.now().activations() - base;
    ledger.reset_peak();
    y.sum().backward();
    return std::pair(kept, ledger.at_peak().activations() - base);
  };
  const auto [kept_plainly, peak_plainly] = kept_and_peak(function_of(mlp));
  EXPECT_GE(kept_plainly, 4 * hidden + narrow);
  const auto [kept, peak] =
      kept_and_peak([&](const Tensor& x) { return tiled(mlp, x, {.tokens = kTile}); });
  constexpr int64_t kSlack = 20'000;
  EXPECT_LE(kept, narrow + kSlack);  // the result
  // Those of a tile and as many gradients of them; gradients of the weights, of tiles' inputs and of x.
  EXPECT_LE(peak, 8 * hidden * kTile / kTokens + 2 * weights + 4 * narrow + kSlack);
  EXPECT_LT(3 * peak, peak_plainly);
}

TEST(TiledTest, RefusesWhatItCannotCut) {
  const torch::nn::Module no_weights;
  const auto same = [](const Tensor& x) { return x; };
  EXPECT_THAT(error_of([&] { tiled(no_weights, torch::zeros({4}), same); }),
              HasSubstr("tiled(): expected x of [..., tokens, features], got sizes [4]"));
  EXPECT_THAT(error_of([&] {
                tiled(no_weights, torch::zeros({4, 2}), same, {.tokens = -1});
              }),
              HasSubstr("expected 0 or more tokens a tile, got -1"));
  const auto pooled = [](const Tensor& x) { return x.mean(0, /*keepdim=*/true); };
  EXPECT_THAT(error_of([&] {
                tiled(no_weights, torch::zeros({8, 2}), pooled, {.tokens = 4, .name = "pool"});
              }),
              AllOf(HasSubstr("pool: expected a function of single tokens"), HasSubstr("[4, 2]"),
                    HasSubstr("got a result of sizes [1, 2]")));
}

// ---- over ranks ----

struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int layer = 0; layer < 3; ++layer) layers->push_back(Gated(8, 100));
    register_module("layers", layers);
  }
  // tokens: of a tile; none: at once.
  Tensor forward(Tensor x, std::optional<int64_t> tokens) {
    for (const auto& layer : *layers) {
      const Gated mlp(std::dynamic_pointer_cast<GatedImpl>(layer));
      x = x + (tokens ? tiled(mlp, x, {.tokens = *tokens}) : function_of(mlp)(x));
    }
    return x;
  }
  torch::nn::ModuleList layers;
};
TORCH_MODULE(Net);

struct Trained {
  std::vector<Tensor> values;
  memory::PagingStatistics paging;
};

// tokens_of: of each rank, in a step.
Trained trained(int stage, std::optional<int64_t> tile,
                const std::function<int64_t(int)>& tokens_of, int64_t budget_bytes = 0,
                bool recomputes = false) {
  Trained run;
  run_ranks(2, [&](comm::World& world) {
    at::set_num_threads(1);
    Options options;
    options.stage = stage_of(stage);
    options.page_bytes = 4_KiB;  // each weight is larger
    options.parameter_budget_bytes = budget_bytes;
    options.compute_dtype = torch::kDouble;
    DistributedDataParallel<Net> model(make_seeded<Net>(), world, options);
    Optimizer<torch::optim::SGD> optimizer(model, torch::optim::SGDOptions(1e-3));
    auto recompute = zeropage::recompute(model, RecomputeOptions::selective());
    for (int step = 0; step < 4; ++step) {
      const auto x =
          torch::linspace(-1, 1 + world.rank() + step, tokens_of(world.rank()) * 8, torch::kDouble);
      Tensor loss;
      {
        std::optional<ActivationScope> forward;
        if (recomputes) forward.emplace(recompute);
        loss = model(x.view({-1, 8}), tile).square().sum();
      }
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    const auto state = full_state(model);
    if (world.rank() != 0) return;
    run.paging = model.paging();
    for (const auto& item : state) run.values.push_back(item.value());
  });
  return run;
}

class TiledAtStagesTest : public ::testing::TestWithParam<int> {};

TEST_P(TiledAtStagesTest, TrainsAsAtOnceAndGathersOnceForAllTiles) {
  const auto alike = [](int /*rank*/) { return 10; };
  const Trained expected = trained(GetParam(), {}, alike);
  const Trained got = trained(GetParam(), 3, alike);
  expect_close(expected.values, got.values);
  EXPECT_EQ(got.paging.bytes_gathered, trained(GetParam(), 100, alike).paging.bytes_gathered);
}

TEST_P(TiledAtStagesTest, RanksMayHaveOtherNumbersOfTiles) {
  const auto other = [](int rank) { return 4 + 9 * rank; };
  expect_close(trained(GetParam(), {}, other).values, trained(GetParam(), 3, other).values);
}

TEST_P(TiledAtStagesTest, UnderARecomputeTrainsAsAtOnce) {
  const auto other = [](int rank) { return 2 + 9 * rank; };  // one rank has a tile alone
  expect_close(trained(GetParam(), {}, other).values,
               trained(GetParam(), 3, other, 0, /*recomputes=*/true).values);
}

INSTANTIATE_TEST_SUITE_P(Stages, TiledAtStagesTest, ::testing::Values(0, 1, 2, 3));

// There is room for not quite two of the three layers.
TEST(TiledOverRanksTest, GathersOfTheNextLayerAreBegunAheadWhereThereIsRoom) {
  const Trained run = trained(
      3, 3, [](int rank) { return 4 + 9 * rank; }, 56_KiB);
  EXPECT_GT(run.paging.prefetched, 0);
  EXPECT_THAT(error_of([] {
                trained(
                    3, 3, [](int /*rank*/) { return 4; }, 16_KiB);
              }),
              AllOf(HasSubstr("tiled() needs parameter pages"),
                    HasSubstr("options.parameter_budget_bytes is 16.0 KiB")));
}

}  // namespace
}  // namespace zeropage::tiled_test
