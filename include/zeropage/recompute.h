// `Recompute`: which activations are computed again, planned under a budget of bytes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <torch/nn/module.h>

#include "zeropage/saved_tensors.h"

// What checkpointed regions and recomputed operators cost.

namespace zeropage::checkpointing {

struct RecomputeStatistics {
  int64_t forwards = 0;          // of regions, or of scopes that recompute operators
  int64_t replays = 0;           // forwards, or operators, repeated in backward
  double forward_flops = 0;      // of those forwards: matrix products, convolutions and attention
  double recomputed_flops = 0;   // of the replays
  double recompute_seconds = 0;  // on the host; work that was enqueued to a device may take longer
};
// One line.
std::string to_string(const RecomputeStatistics& statistics);

// Since the thread began: of regions and scopes that it ran forward, whichever thread repeats them.
RecomputeStatistics recompute_statistics();

// Recompute of operators: any module, without a change to it, keeps fewer of the tensors that
// autograd saves, and computes the others again when backward needs them.
//
//   checkpointing::Recompute recompute(checkpointing::RecomputeOptions::budget(6_GiB));
//   for (auto& batch : *loader) {
//     torch::Tensor loss;
//     {
//       const checkpointing::ActivationScope forward(recompute);
//       loss = criterion(model(batch.data), batch.target);
//     }
//     loss.backward();
//     ...
//
// A model that several ranks train makes it by `zeropage::recompute(model, options)`
// (zeropage/recompute.h), so that all ranks repeat the same operators.
//
// Three ways to choose. *Selective* (Korthikanti et al. 2022, section 5): what takes a matrix product,
// convolution or attention to compute again stays, what is cheap is dropped. *By budget*: the first
// step is measured, costs in seconds and bytes over time, and from then on the set of least extra
// time is dropped whose forecast peak fits (checkpointing/recompute_plan.h). While it is measured,
// the first step keeps to the budget by dropping what takes the fewest operations a byte. *By blocks* (Chen et al.
// 2016): of each block of a module that is a list of equal ones, its input stays, and all else is dropped. It needs the
// least memory and the most time.
//
// More is cheap among operators than among blocks: a norm or an activation function is computed again from its
// input alone. Operators are repeated one by one, with the random state,
// autocast and grad mode of the forward, so gradients have the same bits. Where ranks are threads, operators that draw have
// seeds, as in a region (zeropage/checkpoint.h). What is written in place,
// small, or not saved through an operator stays; what is small and takes a parameter that ranks share (stage 3) to make again is
// dropped, selectively and by blocks, since on another rank it may be large. Regions (zeropage/checkpoint.h) within are
// left to themselves.
//
// Memory means Breakdown::activations() of the ledger on the device: all that is no parameter,
// gradient, state or bucket. Within or around the scope of an ActivationOffload, what recompute keeps
// leaves; the budget is then of all that is kept, here or on the host.
//
// Lifetime, threads: see zeropage/saved_tensors.h. Its scopes are on one thread at a time, and
// do nothing where grad mode is off.
// Errors: those of zeropage/saved_tensors.h. A budget below what is reachable is refused in the
// second forward, with the least that is. An input that was changed in place between forward and
// backward is refused where it is read again.

namespace detail {
class DropPolicy;
class ForwardTape;
class RecomputeAccount;
class StepMeter;
struct ForwardPlan;
}  // namespace detail

// The parameters of each block of a module, in the order in which forward runs the blocks.
struct ModuleBlocks {
  std::vector<std::string> lists =
      {};  // the names of the ModuleLists and Sequentials that hold them
  std::vector<std::vector<at::Tensor>> parameters = {};

  // "the 12 of \"blocks\"".
  std::string to_string() const;
};

// The blocks of a module. lists: the ModuleLists and Sequentials that hold them, by their names ("encoder.layers"), in the
// order in which forward runs them. None: the one of two or more modules of one type, which have modules of their own and
// together more than half of the parameters.
// Throws where there is none or it is not clear which it is: the message has the names to choose from, and the line to write.
ModuleBlocks find_blocks(const torch::nn::Module& module,
                         const std::vector<std::string>& lists = {});

struct RecomputeOptions {
  static RecomputeOptions selective() { return {}; }
  // The most bytes of activations.
  static RecomputeOptions budget(int64_t bytes) { return {.budget_bytes = bytes}; }

  // All of each block but its input. The last block is kept, since its backward comes at once.
  static RecomputeOptions by_blocks(ModuleBlocks blocks);
  // Nothing: for a script that is told what to recompute.
  static RecomputeOptions nothing();

  std::optional<int64_t> budget_bytes = {};
  ModuleBlocks blocks = {};  // none: not by blocks
  bool keeps_all = false;
  // Smaller saved tensors stay, but for those above: repeating an operator costs more than they save.
  int64_t least_bytes = 16 * 1024;
  // Where activations lie.
  c10::DeviceType device = c10::DeviceType::CPU;
  // Gives the tensor (uint8, on the host) rank 0's values. At stage 3 a repeated operator gathers, so all ranks
  // must repeat the same ones. zeropage::recompute() sets it. Empty: this rank decides alone, which the wrapped
  // forward of such a model refuses under a budget.
  std::function<void(const at::Tensor& decision)> agree = {};
};

class Recompute : public ActivationPolicy {
 public:
  // Throws if an option makes no sense.
  explicit Recompute(RecomputeOptions options = {});
  ~Recompute() override;
  Recompute(Recompute&&) noexcept;
  Recompute& operator=(Recompute&&) noexcept;

  // The forecast of the plan in force; nothing while a step is measured, or without a budget.
  std::optional<int64_t> forecast_peak_bytes() const;
  std::optional<double> forecast_replay_seconds() const;
  // By operator: how many saved tensors of it are dropped, their bytes, and what that costs.
  // "" without a plan.
  std::string plan_table() const;

  // Statistics of all forwards so far.
  RecomputeStatistics statistics() const;

  // Whether the calling thread is in a scope that plans by what this rank alone measures: of a budget
  // without RecomputeOptions::agree.
  static bool decides_alone();
  // Whether the calling thread is in a scope of any Recompute.
  static bool runs_forward();

 private:
  std::unique_ptr<Forward> begin_forward() override;
  std::unique_ptr<detail::DropPolicy> choose_policy() const;
  void plan_from(const detail::StepMeter& measured);

  RecomputeOptions options_;
  std::shared_ptr<detail::RecomputeAccount> account_;
  std::shared_ptr<detail::ForwardTape> last_;
  std::shared_ptr<const detail::ForwardPlan> plan_;
  std::string plan_table_;
};

}  // namespace zeropage::checkpointing

// Recompute (zeropage/recompute.h) for a model that several ranks train.
//
//   auto recompute =
//       zeropage::recompute(model, zeropage::checkpointing::RecomputeOptions::budget(6_GiB));
//   for (auto& batch : *loader) {
//     torch::Tensor loss;
//     {
//       const zeropage::ActivationScope forward(recompute);
//       loss = criterion(model(batch.data), batch.target);
//     }
//     loss.backward();
//     ...
//
// The ranks repeat the same operators, because they use what rank 0 measures and plans. Otherwise a rank of a model
// with sharded parameters would gather pages that other ranks do not.

namespace zeropage {

class DistributedDataParallelBase;

// options: their `device` becomes the model's, and `agree`, unless it is set, a broadcast over the
// model's ranks. Give ranks the same options, and batches of the same shapes.
// Lifetime: may outlive the model, not the use of its ranks.
// Collective: a scope of a budget, where there are several ranks: a broadcast of 8 bytes, and
// of the plan, one byte a value of the forward, when there is a new one.
// Throws c10::Error on a budget below 1 byte; later what its scopes throw.
checkpointing::Recompute recompute(const DistributedDataParallelBase& model,
                                   checkpointing::RecomputeOptions options);

}  // namespace zeropage
