#include "optim/fused_step.h"

#include <cmath>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/errors.h"
#include "tests/optim/step_cases.h"

namespace zeropage::optim::fused_step_test {
namespace {

using namespace zeropage::testing;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using torch::optim::AdagradOptions;
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;

using Numbers = std::vector<torch::Tensor>;

// The same steps by LibTorch's operators: the values, then the states.
template <typename Class, typename State, typename Options>
Numbers steps_of(const Options& options, const torch::Tensor& values, const Numbers& gradients,
                 const std::function<Numbers(const State&)>& states_of_state) {
  auto parameter = values.clone().requires_grad_();
  Class optimizer({parameter}, options);
  for (const auto& gradient : gradients) {
    parameter.mutable_grad() = gradient.clone();
    optimizer.step();
  }
  Numbers all = {parameter.detach()};
  const auto& states = optimizer.state();
  const auto found = states.find(parameter.unsafeGetTensorImpl());
  if (found != states.end()) {
    for (const auto& state : states_of_state(static_cast<const State&>(*found->second))) {
      if (state.defined()) all.push_back(state);
    }
  }
  return all;
}

template <typename State>
Numbers adam_states(const State& state) {
  return {state.exp_avg(), state.exp_avg_sq(), state.max_exp_avg_sq()};
}

Numbers libtorch_steps(const AdamWOptions& options, const torch::Tensor& values,
                       const Numbers& gradients) {
  using State = torch::optim::AdamWParamState;
  return steps_of<torch::optim::AdamW, State>(options, values, gradients, adam_states<State>);
}

Numbers libtorch_steps(const AdamOptions& options, const torch::Tensor& values,
                       const Numbers& gradients) {
  using State = torch::optim::AdamParamState;
  return steps_of<torch::optim::Adam, State>(options, values, gradients, adam_states<State>);
}

Numbers libtorch_steps(const SGDOptions& options, const torch::Tensor& values,
                       const Numbers& gradients) {
  return steps_of<torch::optim::SGD, torch::optim::SGDParamState>(
      options, values, gradients,
      [](const auto& state) -> Numbers { return {state.momentum_buffer()}; });
}

Numbers libtorch_steps(const AdagradOptions& options, const torch::Tensor& values,
                       const Numbers& gradients) {
  return steps_of<torch::optim::Adagrad, torch::optim::AdagradParamState>(
      options, values, gradients, [](const auto& state) -> Numbers { return {state.sum()}; });
}

Numbers libtorch_steps(const LionOptions& options, const torch::Tensor& values,
                       const Numbers& gradients) {
  const auto [beta1, beta2] = options.betas();
  auto value = values.clone();
  auto exp_avg = torch::zeros_like(values);
  for (const auto& gradient : gradients) {
    const auto update = (beta1 * exp_avg + (1 - beta1) * gradient).sign();
    value = value * (1 - options.lr() * options.weight_decay()) - options.lr() * update;
    exp_avg = beta2 * exp_avg + (1 - beta2) * gradient;
  }
  return {value, exp_avg};
}

// First passes, which leave directions in place of values.
Numbers libtorch_steps(const MuonOptions& options, const torch::Tensor& /*values*/,
                       const Numbers& gradients) {
  const double momentum = options.momentum();
  torch::Tensor average = torch::zeros_like(gradients[0]);
  torch::Tensor direction;
  for (const auto& gradient : gradients) {
    average = momentum * average + (1 - momentum) * gradient;
    direction = options.nesterov() ? (1 - momentum) * gradient + momentum * average : average;
  }
  return {direction, average};
}

Numbers libtorch_steps(const LambOptions& options, const torch::Tensor& values,
                       const Numbers& gradients) {
  const auto [beta1, beta2] = options.betas();
  torch::Tensor value = values.clone();
  torch::Tensor average = torch::zeros_like(values);
  torch::Tensor square = torch::zeros_like(values);
  double made = 0;
  for (const auto& gradient : gradients) {
    ++made;
    average = beta1 * average + (1 - beta1) * gradient;
    square = beta2 * square + (1 - beta2) * gradient * gradient;
    const auto root = (square / (1 - std::pow(beta2, made))).sqrt() + options.eps();
    value = average / (1 - std::pow(beta1, made)) / root + options.weight_decay() * value;
  }
  return {value, average, square};
}

// The largest difference, in ulp of the element or, where that is small, of the tensor's root mean
// square: a sum that nearly cancels has the error of its terms.
double ulps_between(const torch::Tensor& expected, const torch::Tensor& actual) {
  const auto wide = expected.to(at::kDouble);
  const auto typical = wide.square().mean().sqrt();
  const auto ulp = torch::maximum(wide.abs(), typical) * std::pow(2.0, -23);
  return ((actual.to(at::kDouble) - wide).abs() / ulp).max().item<double>();
}

class FusedStepTest : public ::testing::TestWithParam<StepCase> {
 protected:
  const AnyOptions& options() const { return GetParam().options; }
};

INSTANTIATE_TEST_SUITE_P(Options, FusedStepTest, ::testing::ValuesIn(all_step_cases()), name_of);

TEST_P(FusedStepTest, AgreesWithLibtorchWithinFourUlpAfterSixSteps) {
  const auto values = random_numbers(1003, 1);
  Numbers gradients;
  for (uint64_t seed = 10; seed < 16; ++seed) gradients.push_back(random_numbers(1003, seed));
  const Numbers expected = std::visit(
      [&](const auto& known) { return libtorch_steps(known, values, gradients); }, options());

  Stretch stretch{.values = values.clone(), .states = states_of(options(), values)};
  int64_t number = 0;
  for (const auto& gradient : gradients) {
    stretch.gradient = gradient;
    step(options(), ++number, stretch);
  }
  EXPECT_LE(ulps_between(expected[0], stretch.values), 4);
  ASSERT_EQ(expected.size(), 1 + stretch.states.size());
  for (size_t i = 0; i < stretch.states.size(); ++i) {
    EXPECT_LE(ulps_between(expected[1 + i], stretch.states[i]), 4) << "state " << i;
  }
}

TEST_P(FusedStepTest, GivesTheSameBitsForAnySplit) {
  const auto before = random_stretch(options(), 1003, at::kBFloat16, at::kHalf);
  const auto whole = copy_of(before);
  step(options(), 3, whole, {.scale = 0.7});
  const auto split = copy_of(before);
  int64_t begin = 0;
  for (const int64_t numel : {1, 2, 0, 5, 64, 129, 302, 500}) {
    step(options(), 3, narrow(split, begin, numel), {.scale = 0.7});
    begin += numel;
  }
  ASSERT_EQ(begin, 1003);
  EXPECT_TRUE(same_bits_of(whole, split));
}

TEST_P(FusedStepTest, GivesTheSameBitsForAnyNumberOfThreads) {
  const auto before = random_stretch(options(), 200003);
  const int threads_before = at::get_num_threads();
  std::vector<Stretch> results;
  for (const int threads : {1, 2, 3, 5}) {
    at::set_num_threads(threads);
    results.push_back(copy_of(before));
    step(options(), 2, results.back());
  }
  at::set_num_threads(threads_before);
  for (const Stretch& result : results) EXPECT_TRUE(same_bits_of(results[0], result));
}

TEST_P(FusedStepTest, ChangesNothingWhenAnInfinityWasFound) {
  const auto before = random_stretch(options(), 77, at::kHalf, at::kBFloat16);
  const auto after = copy_of(before);
  step(options(), 2, after, {.found_inf = torch::ones({1})});
  EXPECT_TRUE(same_bits_of(before, after));
  step(options(), 2, after, {.found_inf = torch::zeros({1})});
  EXPECT_FALSE(same_bits_of(before, after));
}

TEST_P(FusedStepTest, StepsAnyNumel) {
  const auto before = random_stretch(options(), 40);
  const auto all = copy_of(before);
  step(options(), 2, all);
  for (int64_t numel = 0; numel < 40; ++numel) {
    const auto some = copy_of(before);
    step(options(), 2, narrow(some, 0, numel));
    EXPECT_TRUE(same_bits_of(narrow(all, 0, numel), narrow(some, 0, numel)));
    EXPECT_TRUE(same_bits_of(narrow(before, numel, 40 - numel), narrow(some, numel, 40 - numel)));
  }
}

TEST_P(FusedStepTest, ScalesTheGradientFirstOfAll) {
  const auto scaled = random_stretch(options(), 101);
  auto multiplied = copy_of(scaled);
  step(options(), 2, scaled, {.scale = 0.3});
  multiplied.gradient = multiplied.gradient * 0.3F;
  step(options(), 2, multiplied);
  EXPECT_TRUE(same_bits_of(multiplied, scaled));
}

TEST_P(FusedStepTest, ChecksAndDoesNothingOnTheMetaDevice) {
  const auto stretch = map(random_stretch(options(), 9),
                           [](const torch::Tensor& tensor) { return tensor.to(at::kMeta); });
  step(options(), 2, stretch);
  EXPECT_EQ(states_of(options(), stretch.values).size(), stretch.states.size());
}

// One element as fp32 operations with every rounding written out.
struct AdamWElement {
  float value, exp_avg, exp_avg_sq;

  void step(double lr, double weight_decay, int number, float gradient) {
    const auto step_size = static_cast<float>(lr / (1 - std::pow(0.9, number)));
    const auto root_factor = static_cast<float>(1 / std::sqrt(1 - std::pow(0.999, number)));
    const float decayed = value * static_cast<float>(1 - lr * weight_decay);
    const float kept = static_cast<float>(0.9) * exp_avg;
    exp_avg = std::fma(static_cast<float>(1 - 0.9), gradient, kept);
    const float kept_sq = static_cast<float>(0.999) * exp_avg_sq;
    const float part = static_cast<float>(1 - 0.999) * gradient;
    exp_avg_sq = std::fma(part, gradient, kept_sq);
    const float denominator = std::fma(std::sqrt(exp_avg_sq), root_factor, 1e-8F);
    const float quotient = exp_avg / denominator;
    value = std::fma(-step_size, quotient, decayed);
  }
};

TEST(FusedAdamWTest, HasTheBitsOfItsOperationsWrittenOut) {
  const auto options = AdamWOptions(0.1).weight_decay(0.01);
  auto stretch = random_stretch(options, 300);
  for (auto& state : stretch.states) state.zero_();
  std::vector<AdamWElement> elements;
  for (int64_t i = 0; i < 300; ++i) elements.push_back({stretch.values[i].item<float>(), 0, 0});
  for (int number = 1; number <= 3; ++number) {
    stretch.gradient = random_numbers(300, static_cast<uint64_t>(10 + number));
    fused_step(options, number, stretch);
    for (int64_t i = 0; i < 300; ++i) {
      AdamWElement& element = elements[static_cast<size_t>(i)];
      element.step(0.1, 0.01, number, stretch.gradient[i].item<float>());
      EXPECT_EQ(element.value, stretch.values[i].item<float>());
      EXPECT_EQ(element.exp_avg, stretch.states[0][i].item<float>());
      EXPECT_EQ(element.exp_avg_sq, stretch.states[1][i].item<float>());
    }
  }
}

TEST(FusedSgdTest, HasTheBitsOfItsOperationsWrittenOut) {
  const Stretch stretch{.values = torch::tensor({0.7F}),
                        .gradient = torch::tensor({0.3F}),
                        .states = {torch::tensor({0.2F})}};
  fused_step(SGDOptions(0.1).momentum(0.9).nesterov(true), 2, stretch);
  const float buffer = std::fma(1.0F, 0.3F, 0.9F * 0.2F);
  EXPECT_EQ(stretch.states[0].item<float>(), buffer);
  EXPECT_EQ(stretch.values.item<float>(), std::fma(-0.1F, std::fma(0.9F, buffer, 0.3F), 0.7F));
}

// All fp32 bit patterns of interest: ties, denormals, overflows, infinities, NaN, and random ones.
torch::Tensor telling_numbers() {
  std::vector<int32_t> bits;
  for (uint32_t high = 0; high <= 0xffff; ++high) {
    for (const uint32_t low : {0x0000U, 0x0001U, 0x0fffU, 0x1000U, 0x1001U, 0x3000U, 0x7fffU,
                               0x8000U, 0x8001U, 0xefffU, 0xf000U, 0xffffU}) {
      bits.push_back(static_cast<int32_t>(high << 16 | low));
    }
  }
  const auto some = torch::tensor(bits, at::kInt);
  auto generator = at::detail::createCPUGenerator(5);
  const auto random =
      torch::randint(std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max(),
                     {100000}, generator, at::TensorOptions(at::kInt));
  return torch::cat({some, random}).view(at::kFloat);
}

TEST(CopyOutTest, IsTheValueRoundedToNearestEven) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    Stretch stretch{.values = telling_numbers()};
    stretch.gradient = torch::zeros_like(stretch.values);
    stretch.copy_out = torch::empty_like(stretch.values, dtype);
    fused_step(SGDOptions(0.0), 1, stretch);
    EXPECT_TRUE(same_bits_but_of_nans(stretch.values.to(dtype), stretch.copy_out));
  }
}

TEST(GradientTest, IsConvertedExactlyFromEveryBitPattern) {
  const auto patterns = torch::arange(-32768, 32768, at::kInt).to(at::kShort);
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const auto gradient = patterns.view(dtype);
    const Stretch stretch{.values = torch::zeros({65536}), .gradient = gradient};
    fused_step(SGDOptions(1.0), 1, stretch);
    const auto is_number = ~gradient.isnan();
    EXPECT_TRUE(torch::equal((-gradient.to(at::kFloat)).masked_select(is_number),
                             stretch.values.masked_select(is_number)));
    EXPECT_TRUE(torch::equal(gradient.isnan(), stretch.values.isnan()));
  }
}

TEST(ValuesTest, ThatAreInfiniteStaySoWithoutWeightDecay) {
  const Stretch stretch{.values = torch::full({8}, -std::numeric_limits<float>::infinity()),
                        .gradient = torch::zeros({8}),
                        .states = {torch::zeros({8}), torch::zeros({8})}};
  fused_step(AdamOptions(), 1, stretch);
  EXPECT_TRUE(stretch.values.isneginf().all().item<bool>());
}

TEST(ValuesTest, AreSeenByAutogradToHaveChanged) {
  const Stretch stretch{.values = torch::ones({3}).requires_grad_(), .gradient = torch::ones({3})};
  const auto squares = stretch.values.square().sum();
  fused_step(SGDOptions(1.0), 1, stretch);
  EXPECT_THAT(error_of([&] { squares.backward(); }), HasSubstr("modified by an inplace operation"));
}

TEST(StatesTest, HaveLibtorchsNamesAndBeginnings) {
  EXPECT_THAT(state_names(AdamWOptions()), ElementsAre("exp_avg", "exp_avg_sq"));
  EXPECT_THAT(state_names(AdamOptions().amsgrad(true)),
              ElementsAre("exp_avg", "exp_avg_sq", "max_exp_avg_sq"));
  EXPECT_THAT(state_names(SGDOptions(0.1)), ElementsAre());
  EXPECT_THAT(state_names(SGDOptions(0.1).momentum(0.5)), ElementsAre("momentum_buffer"));
  EXPECT_THAT(state_names(AdagradOptions()), ElementsAre("sum"));
  EXPECT_THAT(state_names(LionOptions()), ElementsAre("exp_avg"));
  const auto sums = make_states(AdagradOptions().initial_accumulator_value(0.25), torch::ones({5}));
  EXPECT_TRUE(torch::equal(sums[0], torch::full({5}, 0.25)));
  EXPECT_EQ(make_states(AdamOptions(), torch::ones({5}))[1].sum().item<float>(), 0);
}

// What fused_step says to a stretch of 4 elements that `change` spoiled.
std::string refusal(const std::function<void(Stretch&, GradientFactors&)>& change) {
  auto stretch = random_stretch(AdamWOptions(), 4);
  GradientFactors factors;
  change(stretch, factors);
  return error_of([&] { fused_step(AdamWOptions(), 1, stretch, factors); });
}

TEST(FusedStepRefusesTest, TensorsThatAreNotAsDescribedInWords) {
  EXPECT_EQ(refusal([](auto& s, auto&) { s.values = torch::zeros({4}, at::kDouble); }),
            "fused_step: values: expected fp32, got Double; lower precisions keep fp32 master "
            "weights and states");
  EXPECT_EQ(refusal([](auto& s, auto&) { s.values = torch::Tensor(); }),
            "fused_step: values: expected a flat tensor, got an undefined one");
  EXPECT_EQ(refusal([](auto& s, auto&) {
              s.values = torch::zeros({2, 2});
            }),
            "fused_step: values: expected a flat, contiguous tensor, got sizes [2, 2]; pass "
            "tensor.view(-1) of a contiguous tensor");
  EXPECT_THAT(refusal([](auto& s, auto&) { s.values = torch::zeros({8}).slice(0, 0, 8, 2); }),
              HasSubstr("flat, contiguous"));
  EXPECT_EQ(refusal([](auto& s, auto&) { s.gradient = torch::zeros({5}); }),
            "fused_step: gradient: expected 4 elements, as many as values, got 5; pass the same "
            "stretch of every buffer");
  EXPECT_EQ(refusal([](auto& s, auto&) { s.gradient = torch::zeros({4}, at::kLong); }),
            "fused_step: gradient: expected fp32, bf16 or fp16, got Long; convert it with .to()");
  EXPECT_EQ(refusal([](auto& s, auto&) { s.states[1] = s.states[1].to(at::kMeta); }),
            "fused_step: a state: expected it on cpu, where the values are, got meta; move it "
            "there");
  EXPECT_EQ(refusal([](auto& s, auto&) { s.states.pop_back(); }),
            "fused_step: states: expected 2 with these options, got 1; make them with "
            "make_states(options, values)");
  EXPECT_THAT(refusal([](auto& s, auto&) { s.copy_out = torch::zeros({4}); }),
              HasSubstr("copy_out: expected bf16 or fp16, got Float"));
  EXPECT_THAT(refusal([](auto&, auto& f) { f.found_inf = torch::zeros({2}); }),
              HasSubstr("found_inf: expected one fp32 number on cpu, got Float of sizes [2]"));
}

template <typename Options>
std::string refusal_of(const Options& options, int64_t number = 1) {
  return error_of([&] { rule_of(options, number); });
}

TEST(FusedStepRefusesTest, OptionsThatAreOutOfRangeInWords) {
  EXPECT_EQ(refusal_of(AdamWOptions(), 0), "AdamW: step: expected it counted from 1, got 0");
  EXPECT_EQ(refusal_of(AdamOptions(-1)), "Adam: lr: expected 0 or more, got -1");
  EXPECT_EQ(refusal_of(AdamOptions().betas({0.9, 1.0})),
            "Adam: betas: expected each in [0, 1), got 0.9 and 1");
  EXPECT_EQ(refusal_of(SGDOptions(0.1).nesterov(true)),
            "SGD: nesterov: expected momentum above 0 and no dampening, got momentum 0 and "
            "dampening 0");
  EXPECT_EQ(refusal_of(AdagradOptions().eps(-1)), "Adagrad: eps: expected 0 or more, got -1");
  EXPECT_EQ(refusal_of(LionOptions().weight_decay(-1)),
            "Lion: weight_decay: expected 0 or more, got -1");
}

}  // namespace
}  // namespace zeropage::optim::fused_step_test
