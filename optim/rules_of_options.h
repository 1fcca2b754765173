// The options of an optimizer class as a rule's numbers. The only place where what depends on the
// step (bias corrections, the step's size) is computed: in double, then rounded to fp32 once, so
// the CPU and CUDA get the same floats.
//
// step: counted from 1. Throws c10::Error when it or an option is out of range.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "optim/update_rule.h"
#include "zeropage/lamb.h"
#include "zeropage/lion.h"
#include "zeropage/muon.h"

namespace zeropage::optim {

UpdateRule rule_of(const torch::optim::AdamWOptions& options, int64_t step);
UpdateRule rule_of(const torch::optim::AdamOptions& options, int64_t step);
UpdateRule rule_of(const torch::optim::SGDOptions& options, int64_t step);
UpdateRule rule_of(const torch::optim::AdagradOptions& options, int64_t step);
UpdateRule rule_of(const LionOptions& options, int64_t step);
// The first pass's, where there are two.
UpdateRule rule_of(const MuonOptions& options, int64_t step);
UpdateRule rule_of(const LambOptions& options, int64_t step);

// The second pass's.
UpdateRule descent_of(const MuonOptions& options);
UpdateRule descent_of(const LambOptions& options);

// LibTorch's names of the states, in the rule's order: "exp_avg", "exp_avg_sq", ...
std::vector<std::string> state_names(const torch::optim::AdamWOptions& options);
std::vector<std::string> state_names(const torch::optim::AdamOptions& options);
std::vector<std::string> state_names(const torch::optim::SGDOptions& options);
std::vector<std::string> state_names(const torch::optim::AdagradOptions& options);
std::vector<std::string> state_names(const LionOptions& options);
std::vector<std::string> state_names(const MuonOptions& options);
std::vector<std::string> state_names(const LambOptions& options);

// What a state's elements are before the first step.
template <typename Options>
double initial_state(const Options& /*options*/) {
  return 0;
}
inline double initial_state(const torch::optim::AdagradOptions& options) {
  return options.initial_accumulator_value();
}

}  // namespace zeropage::optim
