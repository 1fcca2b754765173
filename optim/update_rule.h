// What an optimizer does to one element: its new value and states from its value, gradient and
// states. The only place where the updates are written down; the loops of the CPU and the kernels
// of CUDA both call it, so their results have the same bits.
//
// A rule's numbers are fp32 and made by rules_of_options from the user's options, in double until
// the last rounding. `states` are fp32, in the order of state_names(); of a rule's kStates the first
// kSignedStates are means, and the others sums or means of squares, which are never negative.
// Free of torch and of CUDA. Throws nothing.
#pragma once

#include <variant>

#include "optim/rounded.h"

namespace zeropage::optim {

namespace detail {

// The gradient of 0.5 weight_decay value^2 added. A value that is infinite stays so without decay.
ZEROPAGE_ELEMENT float with_l2(float gradient, float weight_decay, float value) {
  return weight_decay == 0.0F ? gradient
                              : optim::rounded::multiply_add(weight_decay, value, gradient);
}

// rate average + complement x, as LibTorch computes it: the first product is rounded.
ZEROPAGE_ELEMENT float moved(float average, float rate, float complement, float x) {
  return optim::rounded::multiply_add(complement, x, optim::rounded::multiply(rate, average));
}

}  // namespace detail

enum class WeightDecay : uint8_t { kOfValue, kInGradient };

// Adam (Kingma and Ba 2015, algorithm 1) and AdamW (Loshchilov and Hutter 2019, algorithm 2), with
// the maximum of Reddi et al. 2018 if kAmsgrad.
// States: exp_avg, exp_avg_sq, and max_exp_avg_sq if kAmsgrad.
template <WeightDecay kDecay, bool kAmsgrad>
struct AdamRule {
  static constexpr int kStates = kAmsgrad ? 3 : 2;
  static constexpr int kSignedStates = 1;

  float decay = 0;  // kOfValue: 1 - lr weight_decay, a factor; kInGradient: weight_decay
  float beta1 = 0;
  float beta1_complement = 0;
  float beta2 = 0;
  float beta2_complement = 0;
  float root_factor = 0;  // 1 / sqrt(1 - beta2^step)
  float eps = 0;
  float step_size = 0;  // lr / (1 - beta1^step)

  ZEROPAGE_ELEMENT float apply(float value, float gradient, float* states) const {
    using namespace rounded;
    if constexpr (kDecay == WeightDecay::kOfValue) {
      value = multiply(value, decay);
    } else {
      gradient = optim::detail::with_l2(gradient, decay, value);
    }
    const float average = optim::detail::moved(states[0], beta1, beta1_complement, gradient);
    const float square =
        optim::detail::moved(states[1], beta2, multiply(beta2_complement, gradient), gradient);
    states[0] = average;
    states[1] = square;
    float under_root = square;
    if constexpr (kAmsgrad) {
      // A NaN in either is the maximum.
      under_root = states[2] > square || states[2] != states[2] ? states[2] : square;
      states[2] = under_root;
    }
    const float denominator = multiply_add(square_root(under_root), root_factor, eps);
    return multiply_add(-step_size, divide(average, denominator), value);
  }
};

enum class Momentum : uint8_t { kNone, kHeavyBall, kNesterov };

// States: momentum_buffer, unless kNone.
template <Momentum kMomentum>
struct SgdRule {
  static constexpr int kStates = kMomentum == Momentum::kNone ? 0 : 1;
  static constexpr int kSignedStates = kStates;

  float weight_decay = 0;
  float buffer_rate = 0;           // momentum; 0 in the first step
  float dampening_complement = 0;  // 1 - dampening; 1 in the first step
  float momentum = 0;
  float step_size = 0;  // lr

  ZEROPAGE_ELEMENT float apply(float value, float gradient, [[maybe_unused]] float* states) const {
    using namespace rounded;
    gradient = optim::detail::with_l2(gradient, weight_decay, value);
    if constexpr (kMomentum != Momentum::kNone) {
      states[0] = optim::detail::moved(states[0], buffer_rate, dampening_complement, gradient);
      gradient = kMomentum == Momentum::kNesterov ? multiply_add(momentum, states[0], gradient)
                                                  : states[0];
    }
    return multiply_add(-step_size, gradient, value);
  }
};

// Duchi et al. 2011, diagonal. States: sum.
struct AdagradRule {
  static constexpr int kStates = 1;
  static constexpr int kSignedStates = 0;

  float weight_decay = 0;
  float eps = 0;
  float step_size = 0;  // lr / (1 + (step - 1) lr_decay)

  ZEROPAGE_ELEMENT float apply(float value, float gradient, float* states) const {
    using namespace rounded;
    gradient = optim::detail::with_l2(gradient, weight_decay, value);
    states[0] = multiply_add(gradient, gradient, states[0]);
    const float denominator = add(square_root(states[0]), eps);
    return multiply_add(-step_size, divide(gradient, denominator), value);
  }
};

// Lion (Chen et al. 2023, arXiv:2302.06675, algorithm 2). States: exp_avg.
struct LionRule {
  static constexpr int kStates = 1;
  static constexpr int kSignedStates = 1;

  float decay = 1;  // 1 - lr weight_decay
  float beta1 = 0;
  float beta1_complement = 0;
  float beta2 = 0;
  float beta2_complement = 0;
  float step_size = 0;  // lr

  ZEROPAGE_ELEMENT float apply(float value, float gradient, float* states) const {
    using namespace rounded;
    const float direction = optim::detail::moved(states[0], beta1, beta1_complement, gradient);
    states[0] = optim::detail::moved(states[0], beta2, beta2_complement, gradient);
    // 0 and NaN are their own signs.
    const float sign = direction > 0.0F ? 1.0F : direction < 0.0F ? -1.0F : direction;
    return multiply_add(-step_size, sign, multiply(value, decay));
  }
};

// Some updates go over the elements twice, because there is something of the whole tensor between (optim/tensor_form.h). The
// first pass leaves a direction in place of the value. The second one is DescentRule.

// The direction of Muon (Jordan et al. 2024), whose matrix is orthogonalised then. States: momentum_buffer.
template <bool kNesterov>
struct MuonDirectionRule {
  static constexpr int kStates = 1;
  static constexpr int kSignedStates = 1;

  float momentum = 0;
  float momentum_complement = 0;

  ZEROPAGE_ELEMENT float apply(float /*value*/, float gradient, float* states) const {
    states[0] = optim::detail::moved(states[0], momentum, momentum_complement, gradient);
    if constexpr (!kNesterov) return states[0];
    return optim::detail::moved(gradient, momentum_complement, momentum, states[0]);
  }
};

// The direction of LAMB (You et al. 2019, algorithm 2). States: exp_avg, exp_avg_sq.
struct LambRule {
  static constexpr int kStates = 2;
  static constexpr int kSignedStates = 1;

  float decay = 0;  // weight_decay
  float beta1 = 0;
  float beta1_complement = 0;
  float beta2 = 0;
  float beta2_complement = 0;
  float average_factor = 0;  // 1 / (1 - beta1^step)
  float root_factor = 0;     // 1 / sqrt(1 - beta2^step)
  float eps = 0;

  ZEROPAGE_ELEMENT float apply(float value, float gradient, float* states) const {
    using namespace rounded;
    states[0] = optim::detail::moved(states[0], beta1, beta1_complement, gradient);
    states[1] =
        optim::detail::moved(states[1], beta2, multiply(beta2_complement, gradient), gradient);
    const float denominator = multiply_add(square_root(states[1]), root_factor, eps);
    const float direction = divide(multiply(states[0], average_factor), denominator);
    return optim::detail::with_l2(direction, decay, value);
  }
};

// A step along a direction, which comes as the gradient.
struct DescentRule {
  static constexpr int kStates = 0;
  static constexpr int kSignedStates = 0;

  float decay = 1;      // 1 - lr weight_decay, a factor on the value
  float step_size = 0;  // lr

  ZEROPAGE_ELEMENT float apply(float value, float gradient, float* /*states*/) const {
    using namespace rounded;
    return multiply_add(-step_size, gradient, multiply(value, decay));
  }
};

using UpdateRule =
    std::variant<AdamRule<WeightDecay::kOfValue, false>, AdamRule<WeightDecay::kOfValue, true>,
                 AdamRule<WeightDecay::kInGradient, false>,
                 AdamRule<WeightDecay::kInGradient, true>, SgdRule<Momentum::kNone>,
                 SgdRule<Momentum::kHeavyBall>, SgdRule<Momentum::kNesterov>, AdagradRule, LionRule,
                 MuonDirectionRule<false>, MuonDirectionRule<true>, LambRule, DescentRule>;

}  // namespace zeropage::optim
