// A mixture of experts has the values and gradients of a dense loop over its experts, wherever tokens go.
#include "zeropage/experts.h"

#include <cmath>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "fused/experts/expert_linear.h"
#include "operators/meta_operators.h"
#include "tests/harness/autocast.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "zeropage/zeropage.h"

namespace zeropage::experts_test {
namespace {

using namespace zeropage::testing;
using parallel::ExpertActivation;
using parallel::Experts;
using parallel::ExpertsOptions;
using parallel::RouterSums;
using parallel::Scoring;
using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;

constexpr int64_t kWidth = 8, kHidden = 12, kExperts = 5, kActive = 2;

ExpertsOptions options_of(int64_t experts = kExperts, int64_t active = kActive) {
  return {kWidth, kHidden, experts, active};
}

// Modules draw from one generator, which ranks as threads share.
Experts make_experts(const ExpertsOptions& options, uint64_t seed = 3) {
  static std::mutex generator;
  const std::lock_guard lock(generator);
  torch::manual_seed(seed);
  return Experts(options);
}

Tensor tokens_of(int64_t count, uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  return torch::randn({count, kWidth}, generator);
}

// What a layer gives, by a loop over all experts and tokens in plain LibTorch.
struct Dense {
  Tensor outputs;
  Tensor loss;  // of balance, with its factor
};

Dense dense(const Tensor& input, const parallel::ExpertsImpl& layer,
            const ExpertsOptions& options) {
  const auto wide = input.scalar_type() == torch::kDouble ? torch::kDouble : torch::kFloat;
  const Tensor tokens = input.reshape({-1, options.d_model});
  const Tensor scores = torch::matmul(tokens.to(wide), layer.router.to(wide).t());
  const bool softmax = options.scoring == Scoring::kSoftmax;
  const Tensor scored = softmax ? torch::softmax(scores, -1) : torch::sigmoid(scores);
  const Tensor ranked =
      layer.balance_bias.defined() ? (scored + layer.balance_bias).detach() : scored.detach();
  const Tensor choices = std::get<1>(ranked.topk(options.active, -1));  // [tokens, active]
  Tensor weights = scored.gather(1, choices);
  if (options.normalise) weights = weights / weights.sum(-1, true);
  const int64_t copies = choices.numel();
  const auto capacity =
      options.capacity_factor
          ? static_cast<int64_t>(std::ceil(*options.capacity_factor * static_cast<double>(copies) /
                                           static_cast<double>(options.experts)))
          : copies;
  std::vector<int64_t> load(static_cast<size_t>(options.experts));
  std::vector<Tensor> rows;
  for (int64_t token = 0; token < tokens.size(0); ++token) {
    Tensor row = torch::zeros({options.d_model}, tokens.options().dtype(wide));
    for (int64_t slot = 0; slot < options.active; ++slot) {
      const auto expert = choices[token][slot].item<int64_t>();
      if (load[static_cast<size_t>(expert)]++ >= capacity) continue;
      const Tensor up = torch::mv(layer.w_up[expert], tokens[token]);
      const Tensor hidden = layer.w_gate.defined()
                                ? torch::silu(torch::mv(layer.w_gate[expert], tokens[token])) * up
                                : torch::gelu(up);
      row = row + torch::mv(layer.w_down[expert], hidden).to(wide) * weights[token][slot];
    }
    rows.push_back(row.to(tokens.scalar_type()));
  }
  Dense result;
  result.outputs = rows.empty() ? tokens : torch::stack(rows).view(input.sizes());
  const Tensor probabilities = softmax ? scored : scored / scored.sum(-1, true);
  const Tensor chosen = torch::tensor(load).to(wide) / std::max<int64_t>(1, tokens.size(0));
  result.loss = (chosen * probabilities.mean(0)).sum() * options.experts * options.balance_loss;
  return result;
}

double distance(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0) return 0;
  return (a.detach().to(torch::kDouble) - b.detach().to(torch::kDouble)).abs().max().item<double>();
}

// Both, forward and backward, and how far outputs and gradients are from each other.
void expect_as_dense(const ExpertsOptions& options, torch::Dtype dtype, double tolerance,
                     const std::vector<int64_t>& leading = {4, 6}) {
  Experts layer = make_experts(options);
  Experts plain = make_experts(options);
  layer->to(dtype);
  plain->to(dtype);
  std::vector<int64_t> sizes = leading;
  sizes.push_back(kWidth);
  auto generator = at::detail::createCPUGenerator(uint64_t{9});
  const Tensor drawn = torch::randn(sizes, generator).to(dtype);
  const Tensor of_output = torch::randn(sizes, generator).to(dtype);
  const Tensor x = drawn.clone().requires_grad_(), plain_x = drawn.clone().requires_grad_();
  const Tensor y = layer(x);
  const Tensor loss = layer->auxiliary_loss();
  const Dense expected = dense(plain_x, *plain, options);
  EXPECT_EQ(y.sizes(), x.sizes());
  EXPECT_EQ(y.scalar_type(), dtype);
  EXPECT_LE(distance(y, expected.outputs), tolerance);
  EXPECT_LE(distance(loss, expected.loss), tolerance);
  ((y * of_output).sum() + loss).backward();
  ((expected.outputs * of_output).sum() + expected.loss).backward();
  EXPECT_LE(distance(x.grad(), plain_x.grad()), tolerance);
  const auto parameters = plain->named_parameters();
  for (const auto& item : layer->named_parameters()) {
    ASSERT_TRUE(item.value().grad().defined()) << item.key();
    const Tensor& of_plain = parameters[item.key()].grad();
    EXPECT_LE(distance(item.value().grad(),
                       of_plain.defined() ? of_plain : torch::zeros_like(item.value())),
              tolerance)
        << item.key();
  }
}

std::vector<ExpertsOptions> kinds() {
  std::vector<ExpertsOptions> all(7, options_of());
  all[1].scoring = Scoring::kSigmoid;
  all[2].normalise = false;
  all[3].activation = ExpertActivation::kGelu;
  all[4].balance_loss = 0.3;
  all[5].balance_loss = 0.3;
  all[5].scoring = Scoring::kSigmoid;
  all[6].capacity_factor = 0.7;
  all.push_back(options_of(kExperts, kExperts));
  all.push_back(options_of(1, 1));
  all.push_back(options_of(16, 1));
  all.back().capacity_factor = 1;
  all.back().balance_loss = 0.1;
  return all;
}

TEST(ExpertsTest, HaveTheValuesAndGradientsOfADenseLoopInFp64) {
  for (const ExpertsOptions& options : kinds()) expect_as_dense(options, torch::kDouble, 1e-12);
}

TEST(ExpertsTest, HaveThemInFp32) {
  for (const ExpertsOptions& options : kinds()) expect_as_dense(options, torch::kFloat, 1e-5);
}

TEST(ExpertsTest, HaveThemInBf16WithARouterInFp32) {
  for (const ExpertsOptions& options : kinds()) expect_as_dense(options, torch::kBFloat16, 0.05);
}

TEST(ExpertsTest, TakeInputsOfAnyNumberOfDimensionsAndTokens) {
  for (const auto& leading : std::vector<std::vector<int64_t>>{{}, {1}, {3}, {2, 1, 3}}) {
    expect_as_dense(options_of(), torch::kDouble, 1e-12, leading);
  }
}

TEST(ExpertsTest, RouteInFp32UnderAutocast) {
  Experts layer = make_experts(options_of());
  const Tensor x = tokens_of(40, 5);
  const Tensor exact = layer(x);
  Tensor cast;
  {
    const AutocastToBf16 autocast;
    cast = layer(x);
  }
  EXPECT_EQ(cast.scalar_type(), torch::kBFloat16);
  // A token that went to another expert would be further away than rounding.
  EXPECT_LE(distance(cast, exact), 0.02);
  cast.sum().backward();
  EXPECT_EQ(layer->w_up.grad().scalar_type(), torch::kFloat);
}

TEST(ExpertsTest, AnExpertWithoutATokenHasAZeroGradient) {
  Experts layer = make_experts(options_of(4, 1));
  {
    const torch::NoGradGuard no_grad;
    layer->router.zero_();
    layer->router[2].fill_(1);
  }
  layer(torch::ones({6, kWidth})).sum().backward();
  for (const Tensor& weight : {layer->w_up, layer->w_gate, layer->w_down}) {
    for (int64_t expert = 0; expert < 4; ++expert) {
      EXPECT_EQ(weight.grad()[expert].abs().sum().item<float>() > 0, expert == 2) << expert;
    }
  }
}

TEST(ExpertsTest, WithoutATokenAllGradientsAreZeros) {
  for (ExpertsOptions options : kinds()) {
    options.balance_loss = 0.1;
    Experts layer = make_experts(options);
    const Tensor x = torch::zeros({3, 0, kWidth}).requires_grad_();
    const Tensor y = layer(x);
    EXPECT_EQ(y.sizes(), x.sizes());
    const Tensor loss = layer->auxiliary_loss();
    EXPECT_EQ(loss.item<float>(), 0);
    (y.sum() + loss).backward();
    for (const auto& item : layer->named_parameters()) {
      ASSERT_TRUE(item.value().grad().defined()) << item.key();
      EXPECT_EQ(item.value().grad().abs().sum().item<float>(), 0) << item.key();
    }
  }
}

TEST(ExpertsTest, TokensBeyondTheCapacityGetNothingFromTheirExpert) {
  ExpertsOptions options = options_of(4, 1);
  options.capacity_factor = 2;  // 2 * 6 / 4: three tokens
  Experts layer = make_experts(options);
  {
    const torch::NoGradGuard no_grad;
    layer->router.zero_();
    layer->router[2].fill_(1);
  }
  const Tensor x = torch::ones({6, kWidth}).requires_grad_();
  const Tensor y = layer(x);
  y.sum().backward();
  for (int64_t token = 0; token < 6; ++token) {
    EXPECT_EQ(y[token].abs().sum().item<float>() > 0, token < 3) << token;
    EXPECT_EQ(x.grad()[token].abs().sum().item<float>() > 0, token < 3) << token;
  }
}

TEST(ExpertsTest, HaveTheSameBitsOnAnyNumberOfThreads) {
  Experts layer = make_experts(options_of());
  const Tensor x = tokens_of(300, 1);
  std::vector<std::vector<Tensor>> all;
  for (const int threads : {1, 3}) {
    at::set_num_threads(threads);
    layer->zero_grad();
    const Tensor input = x.clone().requires_grad_();
    const Tensor y = layer(input);
    y.square().sum().backward();
    all.push_back({y.detach(), input.grad(), layer->router.grad(), layer->w_up.grad().clone()});
  }
  at::set_num_threads(1);
  for (size_t i = 0; i < all[0].size(); ++i) EXPECT_TRUE(torch::equal(all[0][i], all[1][i])) << i;
}

TEST(ExpertsTest, GroupedProductsOfLibTorchHaveTheValuesOfTheLoop) {
  const Tensor ends = torch::tensor({3, 3, 7}, torch::kInt);
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    const auto drawn = [&](at::IntArrayRef sizes) { return torch::randn(sizes).to(dtype); };
    const Tensor rows = drawn({9, 16}), weight = drawn({3, 24, 16}), gradient = drawn({9, 24});
    const fused::ExpertRows of{ends, /*all=*/false};
    const Tensor back = weight.transpose(1, 2);
    EXPECT_TRUE(torch::equal(fused::grouped_linear(rows, weight, of),
                             fused::expert_linear(rows, weight, of)));
    EXPECT_TRUE(torch::equal(fused::grouped_linear(gradient, back, of),
                             fused::expert_linear(gradient, back, of)));
    const Tensor of_weight = fused::grouped_weight_gradient(gradient, rows, of);
    const Tensor with_gradient = weight.clone().requires_grad_();
    fused::expert_linear(rows, with_gradient, of).backward(gradient);
    EXPECT_TRUE(torch::equal(of_weight, with_gradient.grad()));
    EXPECT_EQ(of_weight[1].abs().sum().item<float>(), 0);
  }
}

// By which a Recompute keeps what takes a product to compute again.
TEST(ExpertsTest, AreProductsOfMatricesToRegions) {
  Experts layer = make_experts(options_of());
  const auto flops = [] { return checkpointing::recompute_statistics().forward_flops; };
  const double before = flops();
  checkpoint([&](const Tensor& tokens) { return layer(tokens); }, tokens_of(12, 4));
  constexpr int64_t kOfExperts = 3 * kActive * kWidth * kHidden, kOfRouter = kWidth * kExperts;
  EXPECT_EQ(flops() - before, 2 * 12 * (kOfExperts + kOfRouter));
}

// ---- the balance ----

// The sums of one forward make its loss of balance, and those of several the loss of all their tokens.
TEST(ExpertsTest, SumsOfTheRouterAreTakenOnceAndMakeTheLossOfAllTokens) {
  ExpertsOptions options = options_of();
  EXPECT_THAT(error_of([&] { make_experts(options)->router_sums(); }),
              HasSubstr("set ExpertsOptions::keep_router_sums"));
  options.balance_loss = 1;
  options.keep_router_sums = true;
  Experts layer = make_experts(options);
  EXPECT_FALSE(layer->router_sums());
  const Tensor first = tokens_of(6, 1), second = tokens_of(9, 2);
  const auto loss_of = [&](const RouterSums& sums) {
    return (sums.chosen * sums.probabilities).sum() *
           (static_cast<double>(options.experts) / static_cast<double>(sums.tokens * sums.tokens));
  };
  const auto gradient_of = [&](const Tensor& loss) {
    layer->router.mutable_grad() = Tensor();
    loss.backward();
    return layer->router.grad().clone();
  };
  layer(first);
  layer(second);
  const auto both = layer->router_sums();
  layer->auxiliary_loss();
  EXPECT_EQ(both->tokens, 15);
  EXPECT_FALSE(layer->router_sums());
  layer(torch::cat({first, second}));
  const Tensor of_one = loss_of(*layer->router_sums());
  const Tensor own = layer->auxiliary_loss();
  EXPECT_NEAR(of_one.item<double>(), own.item<double>(), 1e-6);
  EXPECT_NEAR(loss_of(*both).item<double>(), own.item<double>(), 1e-6);
  const Tensor wanted = gradient_of(own);
  EXPECT_LT(distance(gradient_of(loss_of(*both)), wanted), 1e-6);
  layer->eval();
  layer(first);
  EXPECT_FALSE(layer->router_sums()) << "evaluation adds nothing";
}

TEST(ExpertsTest, AnAuxiliaryLossIsTakenOnceAndIsTheSumOfItsForwards) {
  ExpertsOptions options = options_of();
  options.balance_loss = 0.5;
  Experts layer = make_experts(options);
  EXPECT_EQ(layer->auxiliary_loss().item<float>(), 0);
  const Tensor first = tokens_of(6, 1), second = tokens_of(9, 2);
  layer(first);
  const auto one = layer->auxiliary_loss().item<float>();
  layer(second);
  const auto two = layer->auxiliary_loss().item<float>();
  layer(first);
  layer(second);
  EXPECT_FLOAT_EQ(layer->auxiliary_loss().item<float>(), one + two);
  EXPECT_EQ(layer->auxiliary_loss().item<float>(), 0);
  layer->eval();
  layer(first);
  EXPECT_EQ(layer->auxiliary_loss().item<float>(), 0) << "evaluation adds nothing";
  layer->train();
  const torch::NoGradGuard no_grad;
  layer(first);
  EXPECT_EQ(layer->auxiliary_loss().item<float>(), 0) << "nor does a forward without gradients";
}

TEST(ExpertsTest, ALossThatNobodyTakesIsRefused) {
  ExpertsOptions options = options_of();
  options.balance_loss = 0.5;
  Experts layer = make_experts(options);
  const std::string error = error_of([&] {
    for (int step = 0; step < 40; ++step) layer(tokens_of(2, 1)).sum().backward();
  });
  EXPECT_THAT(error,
              AllOf(HasSubstr("32 forwards have added losses of balance that nobody has taken"),
                    HasSubstr("add auxiliary_loss() to the loss")));
}

TEST(ExpertsTest, ARegionsLossIsTakenBehindItAndItsRepetitionAddsNothing) {
  ExpertsOptions options = options_of();
  options.balance_loss = 0.5;
  options.balance_bias_rate = 0.1;
  Experts plain = make_experts(options), layer = make_experts(options);
  const Tensor x = tokens_of(12, 4);
  const Tensor plain_y = plain(x).square().sum();
  (plain_y + plain->auxiliary_loss()).backward();
  const Tensor y =
      checkpoint([&](const Tensor& tokens) { return layer(tokens).square().sum(); }, x);
  (y + layer->auxiliary_loss()).backward();
  EXPECT_EQ(layer->auxiliary_loss().item<float>(), 0);
  const auto expected = plain->parameters(), actual = layer->parameters();
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_TRUE(torch::equal(expected[i].grad(), actual[i].grad())) << i;
  run_ranks(1, [&](World& world) {
    plain->update_balance(world);
    layer->update_balance(world);
  });
  EXPECT_TRUE(torch::equal(plain->balance_bias, layer->balance_bias));
}

TEST(ExpertsTest, WhatIsTakenWithinARegionHasItsValueInTheRepetition) {
  ExpertsOptions options = options_of();
  options.balance_loss = 0.5;
  options.keep_router_sums = true;
  Experts plain = make_experts(options), layer = make_experts(options);
  const auto run = [](Experts& experts, const Tensor& x) {
    const Tensor y = experts(x);
    return (y * experts->auxiliary_loss() * experts->router_sums()->probabilities.prod()).sum();
  };
  run(plain, tokens_of(12, 4)).backward();
  checkpoint([&](const Tensor& x) { return run(layer, x); }, tokens_of(12, 4)).backward();
  EXPECT_TRUE(torch::equal(plain->router.grad(), layer->router.grad()));
}

TEST(ExpertsTest, TheBalanceMovesByTheLoadOfAllRanks) {
  ExpertsOptions options = options_of(4, 1);
  options.balance_bias_rate = 0.25;
  run_ranks(2, [&](World& world) {
    Experts layer = make_experts(options);
    const torch::NoGradGuard no_grad;
    layer->router.copy_(torch::eye(4, kWidth));
    const auto run = [&](std::vector<int64_t> experts) {
      const torch::AutoGradMode grad(true);
      layer(torch::eye(4, kWidth).index_select(0, torch::tensor(experts)) * 5);
    };
    // Rank 0 alone would raise 3, and rank 1 alone would lower it: together all but 0 and 2 are at the mean.
    run(world.rank() == 0 ? std::vector<int64_t>{0, 0, 0, 1} : std::vector<int64_t>{3, 3, 1, 2});
    EXPECT_TRUE(torch::equal(world.sum(layer->choices()), torch::tensor({3, 2, 1, 2})));
    layer->update_balance(world);
    EXPECT_TRUE(torch::equal(layer->choices(), torch::zeros({4}, torch::kLong)));
    EXPECT_TRUE(torch::equal(layer->balance_bias, torch::tensor({-0.25, 0.0, 0.25, 0.0})))
        << layer->balance_bias;
    layer->update_balance(world);
    EXPECT_TRUE(torch::equal(layer->balance_bias, torch::tensor({-0.25, 0.0, 0.25, 0.0})))
        << "no token came since";
    layer->eval();
    run({1, 1, 1});
    layer->train();
    layer(torch::eye(4, kWidth));
    layer->update_balance(world);
    EXPECT_EQ(layer->balance_bias[1].item<float>(), 0) << "evaluation counts nothing";
  });
}

TEST(ExpertsTest, ChoicesAreThoseOfForwardsWithValues) {
  operators::provide_meta_operators();
  DeferredModule deferred([] { return make_experts(options_of(4, 1)); });
  Experts layer = deferred.module();
  layer(torch::empty({6, kWidth}, torch::kMeta));
  run_ranks(1, [&](World& world) {
    DistributedDataParallel model(std::move(deferred), world);
    model(tokens_of(7, 1));
    EXPECT_EQ(layer->choices().sum().item<int64_t>(), 7);
  });
}

TEST(ExpertsTest, TheBiasChoosesAndDoesNotWeigh) {
  ExpertsOptions options = options_of();
  options.balance_bias_rate = 0.1;
  options.scoring = Scoring::kSigmoid;
  Experts layer = make_experts(options);
  {
    const torch::NoGradGuard no_grad;
    layer->balance_bias[3] = 10;
  }
  const Tensor x = tokens_of(7, 2);
  EXPECT_LE(distance(layer(x), dense(x, *layer, options).outputs), 1e-5);
}

TEST(ExpertsTest, ABalancedBiasEvensOutTheLoad) {
  ExpertsOptions options = options_of();
  options.balance_bias_rate = 0.005;
  run_ranks(1, [&](World& world) {
    Experts layer = make_experts(options);
    const Tensor x = tokens_of(200, 3) + 0.7 * layer->router.detach()[2].sign();
    const auto largest = [&] {
      const torch::NoGradGuard no_grad;
      const Tensor scores =
          torch::softmax(torch::matmul(x, layer->router.t()), -1) + layer->balance_bias;
      return torch::bincount(std::get<1>(scores.topk(kActive, -1)).flatten(), {}, kExperts)
          .max()
          .item<int64_t>();
    };
    const int64_t before = largest();
    for (int step = 0; step < 100; ++step) {
      layer(x);
      layer->update_balance(world);
    }
    EXPECT_LT(largest(), before);
    EXPECT_LT(largest(), 200 * kActive / kExperts + 15);
  });
}

// ---- errors ----

TEST(ExpertsTest, MistakesAreRefusedWithWords) {
  EXPECT_THAT(error_of([] { Experts(options_of(4, 5)); }),
              HasSubstr("expected a token to take from 1 to all 4 experts, got 5"));
  EXPECT_THAT(error_of([] { Experts(options_of(0, 1)); }),
              HasSubstr("expected d_model, d_hidden and experts of 1 or more, got 8, 12 and 0"));
  EXPECT_THAT(error_of([] {
                ExpertsOptions options = options_of();
                options.capacity_factor = 0;
                const Experts experts(options);
              }),
              HasSubstr("expected a capacity_factor above 0, got 0"));
  EXPECT_THAT(error_of([] {
                ExpertsOptions options = options_of();
                options.balance_loss = -1;
                const Experts experts(options);
              }),
              HasSubstr("of 0 or more, got -1 and 0"));
  Experts layer = make_experts(options_of());
  EXPECT_THAT(error_of([&] {
                layer(torch::zeros({3, 7}));
              }),
              HasSubstr("expected an input of [..., 8] (d_model), got [3, 7]"));
  EXPECT_THAT(error_of([&] { layer(torch::zeros({3, 0})); }), HasSubstr("got [3, 0]"));
  EXPECT_THAT(error_of([&] { layer(torch::zeros({})); }), HasSubstr("got []"));
  EXPECT_THAT(error_of([&] {
                layer(torch::zeros({3, 8}, torch::kLong));
              }),
              HasSubstr("expected an input of floating-point numbers, got Long"));
  EXPECT_THAT(error_of([&] {
                layer(torch::zeros({3, 8}, torch::kBFloat16));
              }),
              HasSubstr("expected an input of Float, as the weights, got BFloat16"));
  run_ranks(1, [&](World& world) {
    EXPECT_THAT(error_of([&] { layer->update_balance(world); }),
                HasSubstr("expected a layer with a balance_bias_rate above 0"));
  });
}

}  // namespace
}  // namespace zeropage::experts_test
