// Every combination of options that has a code path of its own, and stretches to step with them.
#pragma once

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "optim/fused_step.h"

namespace zeropage::testing {

using AnyOptions =
    std::variant<torch::optim::AdamWOptions, torch::optim::AdamOptions, torch::optim::SGDOptions,
                 torch::optim::AdagradOptions, LionOptions, MuonOptions, LambOptions>;

struct StepCase {
  std::string name;
  AnyOptions options;
};

inline std::ostream& operator<<(std::ostream& out, const StepCase& step) {
  return out << step.name;
}

inline std::vector<StepCase> all_step_cases() {
  using namespace torch::optim;
  std::vector<StepCase> cases;
  const auto add = [&](const std::string& name, const AnyOptions& options) {
    cases.push_back({name, options});
  };
  for (const double decay : {0.0, 0.1}) {
    const std::string decays = decay == 0 ? "" : "Decays";
    for (const bool amsgrad : {false, true}) {
      const std::string suffix = decays + (amsgrad ? "Amsgrad" : "");
      add("AdamW" + suffix, AdamWOptions(0.03).weight_decay(decay).amsgrad(amsgrad));
      add("Adam" + suffix, AdamOptions(0.03).weight_decay(decay).amsgrad(amsgrad));
    }
    add("Sgd" + decays, SGDOptions(0.1).weight_decay(decay));
    add("SgdMomentum" + decays, SGDOptions(0.1).weight_decay(decay).momentum(0.9));
    add("SgdDampening" + decays, SGDOptions(0.1).weight_decay(decay).momentum(0.9).dampening(0.3));
    add("SgdNesterov" + decays, SGDOptions(0.1).weight_decay(decay).momentum(0.9).nesterov(true));
    add("Adagrad" + decays, AdagradOptions(0.1).weight_decay(decay));
    add("AdagradSlows" + decays,
        AdagradOptions(0.1).weight_decay(decay).lr_decay(0.2).initial_accumulator_value(0.5));
    add("Lion" + decays, LionOptions(0.01).weight_decay(decay));
    // Their first passes.
    add("Muon" + decays, MuonOptions(0.02).weight_decay(decay).nesterov(decay == 0));
    add("Lamb" + decays, LambOptions(0.02).weight_decay(decay));
  }
  return cases;
}

// One test loops over the options: a process for each would only load LibTorch.
class EveryStepCaseTest : public ::testing::Test {
 protected:
  void for_each_case(const std::function<void()>& check) {
    for (const StepCase& step_case : all_step_cases()) {
      SCOPED_TRACE(step_case.name);
      options_ = step_case.options;
      check();
    }
  }

  const AnyOptions& options() const { return options_; }

 private:
  AnyOptions options_;
};

inline std::string name_of(const ::testing::TestParamInfo<StepCase>& info) {
  return info.param.name;
}

inline std::vector<torch::Tensor> states_of(const AnyOptions& options,
                                            const torch::Tensor& values) {
  return std::visit([&](const auto& known) { return optim::make_states(known, values); }, options);
}

inline void step(const AnyOptions& options, int64_t number, const optim::Stretch& stretch,
                 const optim::GradientFactors& factors = {}) {
  std::visit([&](const auto& known) { optim::fused_step(known, number, stretch, factors); },
             options);
}

inline torch::Tensor random_numbers(int64_t numel, uint64_t seed) {
  return torch::randn({numel}, at::detail::createCPUGenerator(seed));
}

// Random values, gradient and states, as after some steps. undefined: no copy_out.
inline optim::Stretch random_stretch(const AnyOptions& options, int64_t numel,
                                     at::ScalarType gradient = at::kFloat,
                                     at::ScalarType copy_out = at::ScalarType::Undefined) {
  optim::Stretch stretch;
  stretch.values = random_numbers(numel, 1);
  stretch.gradient = random_numbers(numel, 2).to(gradient);
  if (copy_out != at::ScalarType::Undefined) {
    stretch.copy_out = torch::full({numel}, 7, at::TensorOptions(copy_out));
  }
  for (const auto& made : states_of(options, stretch.values)) {
    // Not negative, since some are under a root.
    stretch.states.push_back(made + random_numbers(numel, 3 + stretch.states.size()).abs());
  }
  return stretch;
}

// Tensors that share no memory with the stretch's; made(tensor) for each that is defined.
inline optim::Stretch map(const optim::Stretch& stretch,
                          const std::function<torch::Tensor(const torch::Tensor&)>& made) {
  optim::Stretch mapped{.values = made(stretch.values), .gradient = made(stretch.gradient)};
  if (stretch.copy_out.defined()) mapped.copy_out = made(stretch.copy_out);
  for (const auto& state : stretch.states) mapped.states.push_back(made(state));
  return mapped;
}

inline optim::Stretch copy_of(const optim::Stretch& stretch) {
  return map(stretch, [](const torch::Tensor& tensor) { return tensor.clone(); });
}

inline optim::Stretch narrow(const optim::Stretch& stretch, int64_t begin, int64_t numel) {
  return map(stretch, [&](const torch::Tensor& tensor) { return tensor.narrow(0, begin, numel); });
}

inline ::testing::AssertionResult same_bits_of(const torch::Tensor& expected,
                                               const torch::Tensor& actual) {
  if (expected.scalar_type() != actual.scalar_type() || expected.numel() != actual.numel()) {
    return ::testing::AssertionFailure() << "another dtype or numel";
  }
  const auto words = expected.element_size() == 2   ? at::kShort
                     : expected.element_size() == 4 ? at::kInt
                                                    : at::kLong;
  const auto differ = expected.cpu().view(words) != actual.cpu().view(words);
  const int64_t count = differ.sum().item<int64_t>();
  if (count == 0) return ::testing::AssertionSuccess();
  const int64_t first = differ.nonzero()[0].item<int64_t>();
  return ::testing::AssertionFailure()
         << count << " of " << expected.numel() << " differ, the first at " << first << ": "
         << expected[first].item<double>() << " and " << actual[first].item<double>();
}

// NaNs are at the same places. Their signs and payloads are the machine's (optim/FUSED_STEP.md).
inline ::testing::AssertionResult same_bits_but_of_nans(const torch::Tensor& expected,
                                                        const torch::Tensor& actual) {
  const auto on_host = actual.cpu();
  if (!torch::equal(expected.isnan(), on_host.isnan())) {
    return ::testing::AssertionFailure() << "NaNs at other places";
  }
  const auto is_number = ~expected.isnan();
  return same_bits_of(expected.masked_select(is_number), on_host.masked_select(is_number));
}

inline ::testing::AssertionResult same_bits_of(const optim::Stretch& expected,
                                               const optim::Stretch& actual) {
  auto result = same_bits_of(expected.values, actual.values);
  if (!result) return result << " (values)";
  if (expected.copy_out.defined()) {
    result = same_bits_of(expected.copy_out, actual.copy_out);
    if (!result) return result << " (copy_out)";
  }
  for (size_t i = 0; i < expected.states.size(); ++i) {
    result = same_bits_of(expected.states[i], actual.states[i]);
    if (!result) return result << " (state " << i << ")";
  }
  return ::testing::AssertionSuccess();
}

}  // namespace zeropage::testing
