#include "optim/rules_of_options.h"

#include <cmath>

#include "zeropage/check.h"

namespace zeropage::optim {
namespace {

// The one rounding of a number that the rules use.
float rounded_once(double number) {
  return static_cast<float>(number);
}

void check_at_least_0(const char* who, const char* option, double value) {
  ZP_CHECK(value >= 0, who, ": ", option, ": expected 0 or more, got ", value);
}

void check_step(const char* who, int64_t step) {
  ZP_CHECK(step >= 1, who, ": step: expected it counted from 1, got ", step);
}

template <WeightDecay kDecay, bool kAmsgrad, typename Options>
AdamRule<kDecay, kAmsgrad> adam_rule(const Options& options, int64_t step) {
  const auto [beta1, beta2] = options.betas();
  const auto steps = static_cast<double>(step);
  return {
      .decay =
          rounded_once(kDecay == WeightDecay::kOfValue ? 1 - options.lr() * options.weight_decay()
                                                       : options.weight_decay()),
      .beta1 = rounded_once(beta1),
      .beta1_complement = rounded_once(1 - beta1),
      .beta2 = rounded_once(beta2),
      .beta2_complement = rounded_once(1 - beta2),
      .root_factor = rounded_once(1 / std::sqrt(1 - std::pow(beta2, steps))),
      .eps = rounded_once(options.eps()),
      .step_size = rounded_once(options.lr() / (1 - std::pow(beta1, steps))),
  };
}

template <WeightDecay kDecay, typename Options>
UpdateRule checked_adam_rule(const char* who, const Options& options, int64_t step) {
  const auto [beta1, beta2] = options.betas();
  check_step(who, step);
  check_at_least_0(who, "lr", options.lr());
  check_at_least_0(who, "eps", options.eps());
  check_at_least_0(who, "weight_decay", options.weight_decay());
  ZP_CHECK(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1, who,
           ": betas: expected each in [0, 1), got ", beta1, " and ", beta2);
  if (options.amsgrad()) return adam_rule<kDecay, true>(options, step);
  return adam_rule<kDecay, false>(options, step);
}

template <Momentum kMomentum>
SgdRule<kMomentum> sgd_rule(const torch::optim::SGDOptions& options, int64_t step) {
  // The buffer begins as the first gradient, without dampening.
  const bool begins = step == 1;
  return {.weight_decay = rounded_once(options.weight_decay()),
          .buffer_rate = rounded_once(begins ? 0 : options.momentum()),
          .dampening_complement = rounded_once(begins ? 1 : 1 - options.dampening()),
          .momentum = rounded_once(options.momentum()),
          .step_size = rounded_once(options.lr())};
}

std::vector<std::string> adam_state_names(bool amsgrad) {
  if (amsgrad) return {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  return {"exp_avg", "exp_avg_sq"};
}

}  // namespace

UpdateRule rule_of(const torch::optim::AdamWOptions& options, int64_t step) {
  return checked_adam_rule<WeightDecay::kOfValue>("AdamW", options, step);
}

UpdateRule rule_of(const torch::optim::AdamOptions& options, int64_t step) {
  return checked_adam_rule<WeightDecay::kInGradient>("Adam", options, step);
}

UpdateRule rule_of(const torch::optim::SGDOptions& options, int64_t step) {
  check_step("SGD", step);
  check_at_least_0("SGD", "lr", options.lr());
  check_at_least_0("SGD", "momentum", options.momentum());
  check_at_least_0("SGD", "weight_decay", options.weight_decay());
  ZP_CHECK(!options.nesterov() || (options.momentum() > 0 && options.dampening() == 0),
           "SGD: nesterov: expected momentum above 0 and no dampening, got momentum ",
           options.momentum(), " and dampening ", options.dampening());
  if (options.momentum() == 0) return sgd_rule<Momentum::kNone>(options, step);
  if (options.nesterov()) return sgd_rule<Momentum::kNesterov>(options, step);
  return sgd_rule<Momentum::kHeavyBall>(options, step);
}

UpdateRule rule_of(const torch::optim::AdagradOptions& options, int64_t step) {
  check_step("Adagrad", step);
  check_at_least_0("Adagrad", "lr", options.lr());
  check_at_least_0("Adagrad", "lr_decay", options.lr_decay());
  check_at_least_0("Adagrad", "weight_decay", options.weight_decay());
  check_at_least_0("Adagrad", "eps", options.eps());
  const double decayed = 1 + static_cast<double>(step - 1) * options.lr_decay();
  return AdagradRule{.weight_decay = rounded_once(options.weight_decay()),
                     .eps = rounded_once(options.eps()),
                     .step_size = rounded_once(options.lr() / decayed)};
}

UpdateRule rule_of(const LionOptions& options, int64_t step) {
  check_step("Lion", step);
  check_options(options);
  const auto [beta1, beta2] = options.betas();
  return LionRule{.decay = rounded_once(1 - options.lr() * options.weight_decay()),
                  .beta1 = rounded_once(beta1),
                  .beta1_complement = rounded_once(1 - beta1),
                  .beta2 = rounded_once(beta2),
                  .beta2_complement = rounded_once(1 - beta2),
                  .step_size = rounded_once(options.lr())};
}

UpdateRule rule_of(const MuonOptions& options, int64_t step) {
  check_step("Muon", step);
  check_options(options);
  if (options.rule() == MuonRule::kAdamW) {
    return adam_rule<WeightDecay::kOfValue, false>(options, step);
  }
  const float momentum = rounded_once(options.momentum());
  const float complement = rounded_once(1 - options.momentum());
  if (options.nesterov()) return MuonDirectionRule<true>{momentum, complement};
  return MuonDirectionRule<false>{momentum, complement};
}

UpdateRule rule_of(const LambOptions& options, int64_t step) {
  check_step("LAMB", step);
  check_options(options);
  const auto [beta1, beta2] = options.betas();
  const auto steps = static_cast<double>(step);
  return LambRule{.decay = rounded_once(options.weight_decay()),
                  .beta1 = rounded_once(beta1),
                  .beta1_complement = rounded_once(1 - beta1),
                  .beta2 = rounded_once(beta2),
                  .beta2_complement = rounded_once(1 - beta2),
                  .average_factor = rounded_once(1 / (1 - std::pow(beta1, steps))),
                  .root_factor = rounded_once(1 / std::sqrt(1 - std::pow(beta2, steps))),
                  .eps = rounded_once(options.eps())};
}

UpdateRule descent_of(const MuonOptions& options) {
  return DescentRule{.decay = rounded_once(1 - options.lr() * options.weight_decay()),
                     .step_size = rounded_once(options.lr())};
}

UpdateRule descent_of(const LambOptions& options) {
  return DescentRule{.decay = 1, .step_size = rounded_once(options.lr())};
}

std::vector<std::string> state_names(const torch::optim::AdamWOptions& options) {
  return adam_state_names(options.amsgrad());
}

std::vector<std::string> state_names(const torch::optim::AdamOptions& options) {
  return adam_state_names(options.amsgrad());
}

std::vector<std::string> state_names(const torch::optim::SGDOptions& options) {
  if (options.momentum() == 0) return {};
  return {"momentum_buffer"};
}

std::vector<std::string> state_names(const torch::optim::AdagradOptions& /*options*/) {
  return {"sum"};
}

std::vector<std::string> state_names(const LionOptions& /*options*/) {
  return {"exp_avg"};
}

std::vector<std::string> state_names(const MuonOptions& options) {
  if (options.rule() == MuonRule::kAdamW) return adam_state_names(/*amsgrad=*/false);
  return {"momentum_buffer"};
}

std::vector<std::string> state_names(const LambOptions& /*options*/) {
  return adam_state_names(/*amsgrad=*/false);
}

}  // namespace zeropage::optim
