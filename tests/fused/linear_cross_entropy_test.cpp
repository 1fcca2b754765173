// The loss without logits equals cross entropy of a linear layer, in less memory.
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/harness/errors.h"
#include "zeropage/bytes.h"
#include "zeropage/fused.h"
#include "zeropage/ledger.h"

namespace zeropage::fused::linear_cross_entropy_test {
namespace {

using memory::operator""_MiB;
using ::testing::HasSubstr;
using torch::Tensor;
using zeropage::testing::error_of;

constexpr int64_t kTokens = 23, kWidth = 13, kClasses = 101;

struct Head {
  Tensor hidden, weight, bias, targets;
};

Head head_of(torch::ScalarType dtype) {
  const auto drawn = [dtype](at::IntArrayRef sizes, uint64_t seed) {
    return torch::randn(sizes, at::detail::createCPUGenerator(seed), torch::kDouble)
        .to(dtype)
        .requires_grad_();
  };
  Head head{drawn({kTokens, kWidth}, 1), drawn({kClasses, kWidth}, 2), drawn({kClasses}, 3),
            torch::randint(kClasses, {kTokens}, at::detail::createCPUGenerator(4), torch::kLong)};
  head.targets[0] = 0;
  head.targets[1] = kClasses - 1;
  return head;
}

Head exact_copy(const Head& head) {
  const auto copy = [](const Tensor& tensor) {
    return tensor.detach().to(torch::kDouble).requires_grad_();
  };
  return {copy(head.hidden), copy(head.weight), copy(head.bias), head.targets};
}

Tensor plain_loss(const Head& head, bool biased, LossOver over) {
  namespace F = torch::nn::functional;
  const Tensor logits = torch::linear(head.hidden, head.weight, biased ? head.bias : Tensor());
  auto options = F::CrossEntropyFuncOptions();
  if (over == LossOver::kSum) options.reduction(torch::kSum);
  return F::cross_entropy(logits, head.targets, options);
}

void expect_near(const Tensor& got, const Tensor& expected, double relative, const char* what) {
  ASSERT_TRUE(got.defined()) << what;
  const double most = std::max(1e-30, expected.abs().max().item<double>());
  EXPECT_LE((got.to(torch::kDouble) - expected).abs().max().item<double>(), relative * most)
      << what;
}

struct Setting {
  torch::ScalarType dtype;
  double relative;
};

void expect_equal(const Setting& setting, int64_t tile_bytes, bool biased, LossOver over,
                  bool ignores) {
  Head head = head_of(setting.dtype);
  if (ignores) head.targets.slice(0, 5, 14).fill_(-100);
  const Head exact = exact_copy(head);
  const Tensor expected = plain_loss(exact, biased, over);
  (expected * 3).backward();
  const Tensor loss =
      linear_cross_entropy(head.hidden, head.weight, head.targets,
                           {.over = over, .tile_bytes = tile_bytes}, biased ? head.bias : Tensor());
  (loss * 3).backward();
  EXPECT_EQ(loss.scalar_type(), setting.dtype == torch::kDouble ? torch::kDouble : torch::kFloat);
  expect_near(loss, expected.detach(), setting.relative, "loss");
  expect_near(head.hidden.grad(), exact.hidden.grad(), setting.relative, "hidden");
  expect_near(head.weight.grad(), exact.weight.grad(), setting.relative, "weight");
  if (biased) expect_near(head.bias.grad(), exact.bias.grad(), setting.relative, "bias");
}

// Low precisions round the logits, which are up to 15 here, and so what exponents multiply: 2^-9 of 15 in bf16.
TEST(LinearCrossEntropyTest, EqualsTheLossOfLogitsWithEveryTileBiasMaskAndPrecision) {
  for (const Setting setting : {Setting{torch::kDouble, 1e-12}, Setting{torch::kFloat, 2e-6},
                                Setting{torch::kBFloat16, 0.05}, Setting{torch::kHalf, 0.01}}) {
    // One token a tile, five, and all.
    for (const int64_t rows : {1, 5, 1000}) {
      for (const bool biased : {false, true}) {
        for (const bool ignores : {false, true}) {
          for (const LossOver over : {LossOver::kMean, LossOver::kSum}) {
            SCOPED_TRACE(c10::str(setting.dtype, ", ", rows, " rows, bias ", biased, ", ignores ",
                                  ignores, ", sum ", over == LossOver::kSum));
            expect_equal(setting,
                         rows * kClasses * static_cast<int64_t>(c10::elementSize(setting.dtype)),
                         biased, over, ignores);
          }
        }
      }
    }
  }
}

TEST(LinearCrossEntropyTest, TakesBatchesOfSequencesAndATransposedWeight) {
  const Head head = head_of(torch::kFloat);
  const Tensor transposed = head.weight.detach().t().contiguous().t().requires_grad_();
  const Tensor loss =
      linear_cross_entropy(head.hidden.detach().slice(0, 0, 22).view({2, 11, kWidth}), transposed,
                           head.targets.slice(0, 0, 22).view({2, 11}));
  const Tensor flat = linear_cross_entropy(head.hidden.detach().slice(0, 0, 22), head.weight,
                                           head.targets.slice(0, 0, 22));
  EXPECT_FLOAT_EQ(loss.item<float>(), flat.item<float>());
  loss.backward();
  flat.backward();
  EXPECT_TRUE(torch::allclose(transposed.grad(), head.weight.grad()));
}

TEST(LinearCrossEntropyTest, GivesGradientsToWhatWantsThemAlone) {
  Head head = head_of(torch::kFloat);
  head.weight.requires_grad_(false);
  linear_cross_entropy(head.hidden, head.weight, head.targets).backward();
  EXPECT_TRUE(head.hidden.grad().defined());
  EXPECT_FALSE(head.weight.grad().defined());
  head = head_of(torch::kFloat);
  linear_cross_entropy(head.hidden.detach(), head.weight, head.targets).backward();
  EXPECT_TRUE(head.weight.grad().defined());
  const torch::NoGradGuard no_grad;
  EXPECT_FALSE(linear_cross_entropy(head.hidden, head.weight, head.targets).requires_grad());
}

// Zero-bubble pipelines split a backward so.
TEST(LinearCrossEntropyTest, GivesTheInputsGradientFirstAndTheWeightsLater) {
  const Head head = head_of(torch::kDouble), exact = exact_copy(head);
  plain_loss(exact, true, LossOver::kMean).backward();
  const Tensor loss = linear_cross_entropy(head.hidden, head.weight, head.targets, {}, head.bias);
  const auto of = [&loss](const Tensor& input, bool again) {
    return torch::autograd::grad({loss}, {input}, {}, /*retain_graph=*/again)[0];
  };
  expect_near(of(head.hidden, true), exact.hidden.grad(), 1e-12, "hidden");
  expect_near(of(head.bias, true), exact.bias.grad(), 1e-12, "bias");
  expect_near(of(head.weight, true), exact.weight.grad(), 1e-12, "weight");
  EXPECT_THAT(error_of([&] { of(head.weight, false); }),
              HasSubstr("a second one over a retained graph"));
}

TEST(LinearCrossEntropyTest, AddsToATiedWeightsOtherGradient) {
  const Head head = head_of(torch::kDouble);
  const auto loss_of = [&](const Tensor& weight, bool fused) {
    const Tensor hidden = torch::embedding(weight, head.targets.flip(0));
    if (fused) return linear_cross_entropy(hidden, weight, head.targets);
    return torch::nn::functional::cross_entropy(torch::linear(hidden, weight), head.targets);
  };
  const Tensor plain = head.weight.detach().clone().requires_grad_(),
               ours = head.weight.detach().clone().requires_grad_();
  loss_of(plain, false).backward();
  loss_of(ours, true).backward();
  expect_near(ours.grad(), plain.grad(), 1e-12, "tied");
}

TEST(LinearCrossEntropyTest, HasAGradientOfZeroWhereNothingCounts) {
  Head head = head_of(torch::kFloat);
  head.targets.fill_(-100);
  const Tensor loss =
      linear_cross_entropy(head.hidden, head.weight, head.targets, {.over = LossOver::kSum});
  loss.backward();
  EXPECT_EQ(loss.item<float>(), 0);
  EXPECT_TRUE(torch::equal(head.weight.grad(), torch::zeros({kClasses, kWidth})));
  EXPECT_TRUE(torch::equal(head.hidden.grad(), torch::zeros({kTokens, kWidth})));
  EXPECT_THAT(error_of([&] { linear_cross_entropy(head.hidden, head.weight, head.targets); }),
              HasSubstr("expected at least one target that counts, got none"));
}

// Loss scaling multiplies by 2^16 only after these gradients were made.
TEST(LinearCrossEntropyTest, KeepsSmallGradientsOfFp16UntilTheScaleComes) {
  const Head head = head_of(torch::kHalf);
  const Head exact = exact_copy(head);
  constexpr double kScale = 65536, kTiny = 1e-7;
  (linear_cross_entropy(head.hidden, head.weight, head.targets) * kTiny * kScale).backward();
  (plain_loss(exact, false, LossOver::kMean) * kTiny * kScale).backward();
  expect_near(head.hidden.grad(), exact.hidden.grad(), 0.01, "hidden");
  expect_near(head.weight.grad(), exact.weight.grad(), 0.01, "weight");
}

// A class that all tokens have: the sum over them is beyond fp16, their mean is not.
TEST(LinearCrossEntropyTest, AddsUpMoreThanFp16HasRoomFor) {
  constexpr int64_t kMany = 16384;
  const Tensor hidden = torch::full({kMany, 1}, 5.0, torch::kHalf);
  const Tensor weight = torch::zeros({32, 1}, torch::kHalf).requires_grad_();
  linear_cross_entropy(hidden, weight, torch::zeros({kMany}, torch::kLong)).backward();
  EXPECT_EQ(weight.grad()[0].item<double>(), -4.84375);
  EXPECT_NEAR(weight.grad()[1].item<double>(), 5.0 / 32, 1e-3);
}

int64_t peak_of(const std::function<void()>& step) {
  memory::Ledger::current()->reset_peak();
  const int64_t before = memory::Ledger::current()->at_peak().total();
  step();
  return memory::Ledger::current()->at_peak().total() - before;
}

TEST(LinearCrossEntropyTest, TakesAQuarterOfThePeakThatLogitsTake) {
  constexpr int64_t kManyTokens = 2048, kLargeVocabulary = 8192, kNarrow = 64;
  const Tensor hidden = torch::randn({kManyTokens, kNarrow}).requires_grad_();
  const Tensor weight = torch::randn({kLargeVocabulary, kNarrow}).requires_grad_();
  const Tensor targets = torch::randint(kLargeVocabulary, {kManyTokens});
  const int64_t plain = peak_of([&] {
    torch::nn::functional::cross_entropy(torch::linear(hidden, weight), targets).backward();
  });
  hidden.mutable_grad() = weight.mutable_grad() = Tensor();
  const int64_t ours = peak_of(
      [&] { linear_cross_entropy(hidden, weight, targets, {.tile_bytes = 8_MiB}).backward(); });
  EXPECT_LT(ours, plain / 4) << plain;
  // A tile, the gradients of both, and the targets and figures of a tile.
  EXPECT_LE(ours, 8_MiB + 4 * kNarrow * (kLargeVocabulary + kManyTokens) + 1_MiB);
}

TEST(LinearCrossEntropyTest, RefusesWhatIsNotRight) {
  Head head = head_of(torch::kFloat);
  const auto refusal = [&] {
    return error_of([&] { linear_cross_entropy(head.hidden, head.weight, head.targets); });
  };
  head.targets[7] = kClasses;
  EXPECT_THAT(
      refusal(),
      HasSubstr(
          "expected targets from 0 to 100, or -100 for a token without loss, got 101 for token 7"));
  head.targets = head.targets.to(torch::kInt);
  EXPECT_THAT(refusal(), HasSubstr("expected int64 targets of [23], got Int of [23]"));
  head = head_of(torch::kFloat);
  head.targets = head.targets.slice(0, 1);
  EXPECT_THAT(refusal(), HasSubstr("expected int64 targets of [23], got Long of [22]"));
  head = head_of(torch::kFloat);
  head.weight = head.weight.t();
  EXPECT_THAT(
      refusal(),
      HasSubstr("expected a weight of [classes, 13] for hidden states of [23, 13], got [13, 101]"));
  head = head_of(torch::kFloat);
  const Tensor loss = linear_cross_entropy(head.hidden, head.weight, head.targets);
  loss.backward({}, /*retain_graph=*/true);
  EXPECT_THAT(error_of([&] { loss.backward(); }),
              HasSubstr("expected one backward, got a second one over a retained graph"));
  EXPECT_THAT(error_of([&] {
                torch::autograd::grad(
                    {linear_cross_entropy(head.hidden, head.weight, head.targets)}, {head.hidden},
                    {}, true,
                    /*create_graph=*/true);
              }),
              HasSubstr("no second derivative"));
}

}  // namespace
}  // namespace zeropage::fused::linear_cross_entropy_test
