// What Zeropage must know of an optimizer class to shard its state.
//
// An update is element-wise when an element's new value depends on that element's value, gradient
// and state alone. Then it may run on any part of a parameter, and gives the same bits as on the
// whole.
//
// For a class of your own, with the constructor A(std::vector<OptimizerParamGroup>, Options):
//
//   template <>
//   struct zeropage::OptimizerTraits<MyOptimizer> {
//     using Options = MyOptimizerOptions;
//     static constexpr bool kElementWise = true;
//   };
#pragma once

#include <memory>

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "offload/lion.h"

namespace zeropage {

template <typename A>
struct OptimizerTraits {
  using Options = torch::optim::OptimizerOptions;
  static constexpr bool kElementWise = false;
};

namespace detail {
template <typename O>
struct ElementWise {
  using Options = O;
  static constexpr bool kElementWise = true;
};
}  // namespace detail

template <>
struct OptimizerTraits<torch::optim::SGD> : detail::ElementWise<torch::optim::SGDOptions> {};
template <>
struct OptimizerTraits<torch::optim::Adam> : detail::ElementWise<torch::optim::AdamOptions> {};
template <>
struct OptimizerTraits<torch::optim::AdamW> : detail::ElementWise<torch::optim::AdamWOptions> {};
template <>
struct OptimizerTraits<torch::optim::Adagrad> : detail::ElementWise<torch::optim::AdagradOptions> {
};
template <>
struct OptimizerTraits<torch::optim::RMSprop> : detail::ElementWise<torch::optim::RMSpropOptions> {
};
template <>
struct OptimizerTraits<Lion> : detail::ElementWise<LionOptions> {};
// Its update searches along a line through all parameters at once: a part of it has no meaning.
template <>
struct OptimizerTraits<torch::optim::LBFGS> {
  using Options = torch::optim::LBFGSOptions;
  static constexpr bool kElementWise = false;
};

// An update of A's formulas in one pass over memory (UpdateBy::kFused).
struct FusedForm;

namespace detail {
std::shared_ptr<const FusedForm> fused_form(const torch::optim::AdamWOptions& defaults);
std::shared_ptr<const FusedForm> fused_form(const torch::optim::AdamOptions& defaults);
std::shared_ptr<const FusedForm> fused_form(const torch::optim::SGDOptions& defaults);
std::shared_ptr<const FusedForm> fused_form(const torch::optim::AdagradOptions& defaults);
std::shared_ptr<const FusedForm> fused_form(const LionOptions& defaults);
}  // namespace detail

// Whether A has one. By class, not by its options: a class of yours may share them.
template <typename A>
inline constexpr bool kHasFusedForm = false;
template <>
inline constexpr bool kHasFusedForm<torch::optim::AdamW> = true;
template <>
inline constexpr bool kHasFusedForm<torch::optim::Adam> = true;
template <>
inline constexpr bool kHasFusedForm<torch::optim::SGD> = true;
template <>
inline constexpr bool kHasFusedForm<torch::optim::Adagrad> = true;
template <>
inline constexpr bool kHasFusedForm<Lion> = true;

}  // namespace zeropage
