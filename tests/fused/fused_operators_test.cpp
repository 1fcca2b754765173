// Each fused operator equals the composition of LibTorch's operators that it stands for, with its gradients, and is refused what it
// cannot do right.
#include <functional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/harness/errors.h"
#include "zeropage/bytes.h"
#include "zeropage/fused.h"
#include "zeropage/ledger.h"

namespace zeropage::fused::fused_operators_test {
namespace {

using ::testing::HasSubstr;
using torch::Tensor;
using zeropage::testing::error_of;
using Tensors = std::vector<Tensor>;
using Function = std::function<Tensors(const Tensors&)>;

struct Pair {
  std::string name;
  Tensors inputs;  // fp64
  Function ours;
  Function plain;
};

void PrintTo(const Pair& pair, std::ostream* out) {
  *out << pair.name;
}

Tensor drawn(at::IntArrayRef sizes, uint64_t seed) {
  return torch::randn(sizes, at::detail::createCPUGenerator(seed), torch::kDouble);
}

Tensor plain_rms(const Tensor& x, const Tensor& weight) {
  return x * (x.square().mean(-1, true) + 1e-6).rsqrt() * weight;
}

Tensor half_turned(const Tensor& x) {
  const auto halves = x.chunk(2, -1);
  return torch::cat({-halves[1], halves[0]}, -1);
}

Tensor plain_rotary(const Tensor& x, const Tensor& cosines, const Tensor& sines) {
  return x * torch::cat({cosines, cosines}, -1) + half_turned(x) * torch::cat({sines, sines}, -1);
}

Tensor angles(at::IntArrayRef sizes) {
  return torch::arange(torch::tensor(sizes).prod().item<int64_t>(), torch::kDouble).reshape(sizes) *
         0.37;
}

// Tables follow the heads' precision, and get no gradient.
Tensor table_for(const Tensor& heads, const Tensor& table) {
  return table.to(heads.scalar_type() == torch::kDouble ? torch::kDouble : torch::kFloat);
}

std::vector<Pair> all_pairs() {
  constexpr int64_t kWidth = 45;
  const Tensor x = drawn({3, 7, kWidth}, 1), residual = drawn({3, 7, kWidth}, 2),
               weight = drawn({kWidth}, 3), bias = drawn({kWidth}, 4),
               heads = drawn({2, 5, 3, 14}, 5);
  const auto layer_norm_of = [](const Tensor& input, const Tensor& of_weight,
                                const Tensor& of_bias) {
    return torch::layer_norm(input, {kWidth}, of_weight, of_bias);
  };
  const auto both = [](const Added& added) { return Tensors{added.normed, added.sum}; };
  const auto rotated = [](const Tensor& angle) {
    return Function([angle](const Tensors& in) {
      // Attention's heads are a transposed view.
      const Tensor by_head = in[0].transpose(1, 2);
      return Tensors{
          rotary(by_head, table_for(by_head, angle.cos()), table_for(by_head, angle.sin()))};
    });
  };
  const auto plainly_rotated = [](const Tensor& angle) {
    return Function([angle](const Tensors& in) {
      const Tensor over_heads = angle.dim() == 3 ? angle.unsqueeze(1) : angle;
      return Tensors{plain_rotary(in[0].transpose(1, 2), over_heads.cos(), over_heads.sin())};
    });
  };
  return {
      {"RmsNorm",
       {x, weight},
       [](const Tensors& in) { return Tensors{rms_norm(in[0], in[1])}; },
       [](const Tensors& in) { return Tensors{plain_rms(in[0], in[1])}; }},
      {"AddRmsNorm",
       {x, residual, weight},
       [=](const Tensors& in) { return both(add_rms_norm(in[0], in[1], in[2])); },
       [](const Tensors& in) {
         return Tensors{plain_rms(in[0] + in[1], in[2]), in[0] + in[1]};
       }},
      {"LayerNorm",
       {x, weight, bias},
       [](const Tensors& in) { return Tensors{layer_norm(in[0], in[1], in[2])}; },
       [=](const Tensors& in) { return Tensors{layer_norm_of(in[0], in[1], in[2])}; }},
      {"LayerNormWithoutBias",
       {x, weight},
       [](const Tensors& in) { return Tensors{layer_norm(in[0], in[1], {})}; },
       [=](const Tensors& in) { return Tensors{layer_norm_of(in[0], in[1], {})}; }},
      {"AddLayerNorm",
       {x, residual, weight, bias},
       [=](const Tensors& in) { return both(add_layer_norm(in[0], in[1], in[2], in[3])); },
       [=](const Tensors& in) {
         return Tensors{layer_norm_of(in[0] + in[1], in[2], in[3]), in[0] + in[1]};
       }},
      {"Rotary", {heads}, rotated(angles({5, 7})), plainly_rotated(angles({5, 7}))},
      {"RotaryOfPackedDocuments",
       {heads},
       rotated(angles({2, 5, 7})),
       plainly_rotated(angles({2, 5, 7}))},
      {"SwiGlu",
       {x, residual},
       [](const Tensors& in) { return Tensors{swiglu(in[0], in[1])}; },
       [](const Tensors& in) { return Tensors{torch::silu(in[0]) * in[1]}; }},
      {"SwiGluOfHalves",
       {drawn({4, 2 * kWidth}, 6)},
       [](const Tensors& in) {
         const auto halves = in[0].chunk(2, -1);
         return Tensors{swiglu(halves[0], halves[1])};
       },
       [](const Tensors& in) {
         const auto halves = in[0].chunk(2, -1);
         return Tensors{torch::silu(halves[0]) * halves[1]};
       }},
      {"BiasGelu",
       {x, bias},
       [](const Tensors& in) { return Tensors{bias_gelu(in[0], in[1])}; },
       [](const Tensors& in) { return Tensors{torch::gelu(in[0] + in[1])}; }},
      {"BiasGeluByTanh",
       {x, bias},
       [](const Tensors& in) { return Tensors{bias_gelu(in[0], in[1], Gelu::kTanh)}; },
       [](const Tensors& in) { return Tensors{torch::gelu(in[0] + in[1], "tanh")}; }},
  };
}

// Results, and gradients of a sum with weights of its own for each element.
Tensors results_and_gradients(const Function& function, const Tensors& inputs) {
  Tensors leaves;
  for (const Tensor& input : inputs) leaves.push_back(input.detach().clone().requires_grad_());
  Tensors results = function(leaves);
  Tensor sum = torch::zeros({}, torch::kDouble);
  for (size_t i = 0; i < results.size(); ++i) {
    sum = sum + (results[i] * drawn(results[i].sizes(), 20 + i).to(results[i].scalar_type())).sum();
  }
  sum.backward();
  for (Tensor& result : results) result = result.detach();
  for (const Tensor& leaf : leaves) results.push_back(leaf.grad());
  return results;
}

class FusedOperatorTest : public ::testing::TestWithParam<Pair> {
 protected:
  // relative: of the largest element.
  void expect_close(torch::ScalarType dtype, double relative) {
    Tensors low, exact;
    for (const Tensor& input : GetParam().inputs) {
      low.push_back(input.to(dtype));
      exact.push_back(low.back().to(torch::kDouble));
    }
    const Tensors expected = results_and_gradients(GetParam().plain, exact);
    const Tensors got = results_and_gradients(GetParam().ours, low);
    ASSERT_EQ(expected.size(), got.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      ASSERT_TRUE(got[i].defined()) << i;
      EXPECT_EQ(got[i].scalar_type(), dtype);
      EXPECT_EQ(got[i].sizes(), expected[i].sizes());
      const double most = expected[i].abs().max().item<double>();
      EXPECT_LE((got[i].to(torch::kDouble) - expected[i]).abs().max().item<double>(),
                relative * most)
          << i;
    }
  }
};

// fp32: of the largest element a millionth, 8 units in the last place. bf16: half a unit, 2^-9, and what the reference's fp64 residual
// sum, which is rounded here, adds.
TEST_P(FusedOperatorTest, EqualsThePlainCompositionInEveryPrecision) {
  expect_close(torch::kDouble, 1e-13);
  expect_close(torch::kFloat, 1e-6);
  expect_close(torch::kBFloat16, 0x1p-7);
  expect_close(torch::kHalf, 0x1p-10);
}

TEST_P(FusedOperatorTest, HasTheSameBitsOnAnyNumberOfThreadsAndWithoutGradients) {
  const int before = at::get_num_threads();
  Tensors inputs;
  for (const Tensor& input : GetParam().inputs) inputs.push_back(input.to(torch::kFloat));
  at::set_num_threads(1);
  const Tensors one = results_and_gradients(GetParam().ours, inputs);
  at::set_num_threads(4);
  const Tensors four = results_and_gradients(GetParam().ours, inputs);
  const torch::NoGradGuard no_grad;
  const Tensors inferred = GetParam().ours(inputs);
  at::set_num_threads(before);
  for (size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(torch::equal(one[i], four[i])) << i;
  for (size_t i = 0; i < inferred.size(); ++i) EXPECT_TRUE(torch::equal(one[i], inferred[i])) << i;
  const c10::InferenceMode inference;
  const Tensors in_inference_mode = GetParam().ours(inputs);
  for (size_t i = 0; i < inferred.size(); ++i)
    EXPECT_TRUE(torch::equal(one[i], in_inference_mode[i])) << i;
}

TEST_P(FusedOperatorTest, HasItsSizesOnTheMetaDevice) {
  Tensors inputs, of_meta;
  for (const Tensor& input : GetParam().inputs) {
    inputs.push_back(input.to(torch::kFloat));
    of_meta.push_back(torch::empty(input.sizes(), torch::kMeta).requires_grad_());
  }
  if (GetParam().name.starts_with("Rotary")) return;  // its tables are of the host here
  const Tensors expected = GetParam().ours(inputs);
  const Tensors got = GetParam().ours(of_meta);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(got[i].sizes(), expected[i].sizes());
    EXPECT_EQ(got[i].strides(), expected[i].strides());
  }
  got[0].sum().backward();
  for (const Tensor& input : of_meta) EXPECT_EQ(input.grad().sizes(), input.sizes());
}

TEST_P(FusedOperatorTest, RefusesASecondDerivative) {
  Tensors inputs;
  for (const Tensor& input : GetParam().inputs) inputs.push_back(input.clone().requires_grad_());
  const Tensor sum = GetParam().ours(inputs)[0].sum();
  EXPECT_THAT(
      error_of([&] { torch::autograd::grad({sum}, inputs, {}, true, /*create_graph=*/true); }),
      HasSubstr("expected a plain backward, got one with create_graph=true"));
}

INSTANTIATE_TEST_SUITE_P(Operators, FusedOperatorTest, ::testing::ValuesIn(all_pairs()),
                         [](const auto& param) { return param.param.name; });

TEST(FusedOperatorsTest, GiveNoGradientToWhatIsFrozen) {
  const Tensor x = drawn({4, 8}, 1).to(torch::kFloat).requires_grad_(), weight = torch::ones({8});
  rms_norm(x, weight).sum().backward();
  EXPECT_TRUE(x.grad().defined());
  EXPECT_FALSE(weight.grad().defined());
  const Tensor bias = torch::zeros({8}).requires_grad_();
  layer_norm(x.detach(), weight, bias).sum().backward();
  EXPECT_TRUE(torch::equal(bias.grad(), torch::full({8}, 4.0F)));
}

TEST(FusedOperatorsTest, TakeASumThatIsUsedAlone) {
  const Tensor x = drawn({4, 8}, 1).to(torch::kFloat).requires_grad_(),
               residual = torch::ones({4, 8}).requires_grad_(),
               weight = torch::ones({8}).requires_grad_();
  add_rms_norm(x, residual, weight).sum.sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), torch::ones({4, 8})));
  EXPECT_TRUE(torch::equal(residual.grad(), torch::ones({4, 8})));
}

// The mean is that of one number, to its last bit.
TEST(FusedOperatorsTest, MakeZerosOfARowOfOneNumber) {
  for (const float number : {1234.567F, 12345.678F, 1e6F}) {
    const Tensor normed =
        layer_norm(torch::full({2, 768}, number), torch::ones({768}), torch::zeros({768}));
    EXPECT_TRUE(torch::equal(normed, torch::zeros({2, 768}))) << number;
  }
}

TEST(FusedOperatorsTest, TakeNoRows) {
  const Tensor x = torch::zeros({0, 8}).requires_grad_(),
               weight = torch::ones({8}).requires_grad_();
  rms_norm(x, weight).sum().backward();
  EXPECT_EQ(x.grad().sizes(), x.sizes());
  EXPECT_TRUE(torch::equal(weight.grad(), torch::zeros({8})));
  EXPECT_EQ(swiglu(x, x).numel(), 0);
  EXPECT_EQ(bias_gelu(x, weight).numel(), 0);
}

TEST(FusedOperatorsTest, SayWhichSizesAndDtypesDoNotFit) {
  const Tensor x = torch::zeros({4, 8}), weight = torch::ones({8});
  EXPECT_THAT(error_of([&] { rms_norm(x, torch::ones({7})); }),
              HasSubstr("rms_norm(): expected a weight of the input's last size, got an input of "
                        "[4, 8] and a weight of [7]"));
  EXPECT_THAT(error_of([&] { rms_norm(x.to(torch::kBFloat16), weight); }),
              HasSubstr("expected the weight as the input, BFloat16 on cpu, got Float on cpu"));
  EXPECT_THAT(error_of([&] {
                rms_norm(torch::zeros({4, 8}, torch::kLong), weight);
              }),
              HasSubstr("expected floating-point numbers, got Long"));
  EXPECT_THAT(error_of([&] { add_rms_norm(x, x[0], weight); }),
              HasSubstr("expected a residual of the input's sizes [4, 8], got [8]"));
  EXPECT_THAT(error_of([&] { swiglu(x, x[0]); }),
              HasSubstr("of the same sizes, got [4, 8] and [8]"));
  EXPECT_THAT(
      error_of([&] {
        rotary(torch::zeros({1, 2, 3, 4}), torch::zeros({3, 4}), torch::zeros({3, 4}));
      }),
      HasSubstr("expected tables of [3, 2] or [1, 3, 2] for heads of [1, 2, 3, 4], got [3, 4]"));
  const Tensor table = torch::zeros({3, 2});
  EXPECT_THAT(error_of([&] {
                rotary(torch::zeros({1, 2, 3, 4}), table, torch::zeros({1, 3, 2}));
              }),
              HasSubstr("tables of the same sizes, got cosines of [3, 2] and sines of [1, 3, 2]"));
  EXPECT_THAT(error_of([&] {
                rotary(torch::zeros({1, 2, 3, 4}), table.to(torch::kBFloat16), table);
              }),
              HasSubstr("expected tables of Float on cpu, got BFloat16"));
  EXPECT_THAT(error_of([&] {
                rotary(torch::zeros({1, 2, 3, 4}), table.clone().requires_grad_(), table);
              }),
              HasSubstr("expected tables without gradients"));
}

}  // namespace
}  // namespace zeropage::fused::fused_operators_test
