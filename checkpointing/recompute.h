// Recompute of operators: any module, without a change to it, keeps fewer of the tensors that
// autograd saves, and computes the others again when backward needs them.
//
//   checkpointing::Recompute recompute(checkpointing::RecomputeOptions::budget(6_GiB));
//   for (auto& batch : *loader) {
//     torch::Tensor loss;
//     {
//       const checkpointing::RecomputeScope forward(recompute);
//       loss = criterion(model(batch.data), batch.target);
//     }
//     loss.backward();
//     ...
//
// A model that several ranks train makes it by `zeropage::recompute(model, options)`
// (zero/recompute.h), so that all ranks repeat the same operators.
//
// Two ways to choose. *Selective* (Korthikanti et al. 2022, section 5): what takes a matrix product,
// convolution or attention to compute again stays, what is cheap is dropped. *By budget*: the first
// step is measured, costs in seconds and bytes over time, and from then on the set of least extra
// time is dropped whose forecast peak fits (checkpointing/recompute_plan.h). While it is measured,
// the first step keeps to the budget by dropping what takes the fewest operations a byte.
//
// At the grain of operators more is cheap than at that of blocks: a norm or an activation function
// comes back from its input alone. Operators are repeated one by one, with the random state,
// autocast and grad mode of the forward, so gradients have the same bits. What is written in place,
// small, or not saved through an operator stays. Regions (checkpointing/checkpoint.h) within are
// left to themselves.
//
// Memory means Breakdown::activations() of the ledger on the device: all that is no parameter,
// gradient, state or bucket.
//
// Lifetime: a Recompute outlives its scopes; graphs live on without it.
// Threads: one, as the forward; backward may be anywhere.
// Errors: a budget below what is reachable is refused in the second forward, with the least that
// is; an input that was changed in place between forward and backward, where it is read again.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>

namespace zeropage::checkpointing {

namespace detail {
class ForwardTape;
struct ForwardPlan;
}  // namespace detail

struct RecomputeOptions {
  static RecomputeOptions selective() { return {}; }
  // The most bytes of activations.
  static RecomputeOptions budget(int64_t bytes) { return {.budget_bytes = bytes}; }

  std::optional<int64_t> budget_bytes;
  // Saved tensors below stay: repeating an operator costs more than they are worth.
  int64_t least_bytes = 16 * 1024;
  // Where activations lie.
  c10::DeviceType device = c10::DeviceType::CPU;
  // With parameters sharded at stage 3 a repeated operator gathers, so all ranks must repeat the
  // same ones: makes the tensor (uint8, on the host) what rank 0's is. zeropage::recompute() sets it.
  // Empty: this rank alone decides, which the wrapped forward of such a model refuses under a budget.
  std::function<void(const at::Tensor& decision)> agree;
};

class Recompute {
 public:
  explicit Recompute(RecomputeOptions options);
  ~Recompute();
  Recompute(const Recompute&) = delete;
  Recompute& operator=(const Recompute&) = delete;

  // What the plan in force lets expect; nothing while a step is measured, or without a budget.
  std::optional<int64_t> forecast_peak_bytes() const;
  std::optional<double> forecast_replay_seconds() const;
  // By operator: how many saved tensors of it are dropped, their bytes, and what that costs.
  // "" without a plan.
  std::string plan_table() const;

 private:
  friend class RecomputeScope;
  // Null where grad mode is off.
  std::shared_ptr<detail::ForwardTape> begin_forward();
  void plan_from(const detail::ForwardTape& measured);

  const RecomputeOptions options_;
  std::shared_ptr<detail::ForwardTape> last_;
  bool last_measures_ = false;
  std::shared_ptr<const detail::ForwardPlan> plan_;
  std::string plan_table_;
};

// While it lives, tensors that autograd saves are dropped or kept as planned: around a forward and
// its loss. Does nothing where grad mode is off.
class RecomputeScope {
 public:
  explicit RecomputeScope(Recompute& recompute);
  ~RecomputeScope();
  RecomputeScope(const RecomputeScope&) = delete;
  RecomputeScope& operator=(const RecomputeScope&) = delete;

  // Whether the calling thread is in a scope that plans by what this rank alone measures: of a budget
  // without RecomputeOptions::agree.
  static bool decides_alone();

 private:
  struct Watching;

  const std::shared_ptr<detail::ForwardTape> tape_;
  const std::unique_ptr<Watching> watching_;  // null where grad mode is off
};

}  // namespace zeropage::checkpointing
