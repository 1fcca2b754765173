// Chooses how a model is trained so that it keeps below the limits of memory that its options set:
//
//   zeropage::Options options;
//   options.device_memory_bytes = 80_GiB;
//   options.host_memory_bytes = 1024_GiB;
//   const zeropage::Fitted fitted = zeropage::fit(model_to_plan, world, options);
//   zeropage::DistributedDataParallel model(zeropage::DeferredModule<Gpt>(construct), world, fitted.options);
//
// It tries what gives the same bits: the stage, what leaves the device, which activations are computed again,
// the size of pages, how far ahead they are fetched and, where that is allowed, when the optimizer's step is made.
// Rank 0 plans (zeropage/plan.h) and all ranks get its choice, the cheapest that fits.
//
// Activations that leave the device (zeropage/activation_offload.h) are not tried, and a plan does not know them.
// A run that uses it with the choice needs less of the device, and more of the host: give what they take there as
// FitOptions::besides_bytes.
//
// Collective. Throws on all ranks alike: if nothing fits, with the table and by how much; and for limits and
// choices that contradict each other.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "zeropage/plan.h"
#include "zeropage/recompute.h"

namespace zeropage {

struct FitOptions {
  // Micro-batches of a step on each rank, and when their gradients are reduced: what the script's AccumulatorOptions say.
  int64_t micro_steps = 1;
  ReduceMicroSteps reduce = ReduceMicroSteps::kAuto;
  int64_t gradient_budget_bytes = 0;
  // How many ranks the axes of these names have in the mesh over which the script wraps its model (WorldDescription); 1: there is no
  // such axis. With "context" the sample has a rank's tokens alone.
  int context = 1, expert = 1;
  parallel::ContextForm context_form = {};
  // The stages and policies to choose from. A list of one decides.
  std::vector<int> stages = {0, 1, 2, 3};
  std::vector<CheckpointPolicy> policies = {CheckpointPolicy::kNone, CheckpointPolicy::kSelective,
                                            CheckpointPolicy::kBlocks};
  // Whose blocks CheckpointPolicy::kBlocks recomputes (PlanOptions::blocks). Empty: those that are found.
  std::vector<std::string> blocks = {};
  // Where the optimizer may be. Empty: on the device; on the host, where that is not the device; and on NVMe, where
  // nvme_directory is set.
  std::vector<memory::Tier> tiers = {};
  // A folder on a local disk that may be used, and how many bytes of it by all ranks of a host. 0: as many as
  // the disk has.
  std::string nvme_directory = {};
  int64_t nvme_bytes = 0;
  // Whether the step may be made in backward (StepWhen::kInBackward), which excludes what looks at all gradients
  // first, such as clipping. It keeps few gradients on the host.
  bool may_step_in_backward = false;
  // What is taken of the device besides tensors. Unset: as LibTorch has it on the world's device. A simulated world has
  // none, and an accelerator that is not CUDA's has fixed segments.
  std::optional<DeviceAllocator> allocator = {};
  // Host memory of a rank to leave free for what no plan knows, such as the buffers of a save (13 MiB), and
  // the copy that a StateSaver writes from beside training.
  int64_t besides_bytes = 0;
  // Device memory of a rank to leave free for what the script holds there from step to step and no plan knows: batches,
  // tensors of its own, and a WeightAverage, which takes 4 bytes for each parameter that the rank owns. What is there
  // already when fit() is called is counted without it.
  int64_t besides_device_bytes = 0;
};

struct Fitted {
  Options options = {};  // as they were given, with the choice in them
  // What the script computes again, by recompute(model, fitted).
  CheckpointPolicy checkpointing = CheckpointPolicy::kNone;
  // The names of what holds the blocks that are computed again. Empty: none are, or the script makes regions of them, as
  // ModelToPlan::checkpoint_blocks does.
  std::vector<std::string> blocks = {};
  // The choice, and what it takes of each limit, in a line; for the log, and for RunState::values of a state on disk.
  std::string description = {};
  // What the script does for the choice besides taking the options, in a line; "" for nothing.
  std::string for_script = {};
};

// What the choice computes again: nothing, cheap operators, or the blocks. The same lines for any choice:
//
//   auto recompute = zeropage::recompute(model, fitted);
//   for (auto& batch : *loader) {
//     torch::Tensor loss;
//     {
//       const zeropage::ActivationScope forward(recompute);
//       loss = criterion(model(batch.data), batch.target);
//     }
//     loss.backward();
//
// Where the script makes regions of blocks itself, it is nothing.
checkpointing::Recompute recompute(const DistributedDataParallelBase& model, const Fitted& fitted);

namespace detail {

Fitted fit(const MakePlannedModel& make, Blocks blocks, const comm::World& world,
           const Options& options, const FitOptions& fit_options);

}  // namespace detail

template <typename M>
Fitted fit(const ModelToPlan<M>& model, const comm::World& world, const Options& options,
           const FitOptions& fit_options = {}) {
  return detail::fit(detail::make_planned(model), detail::blocks_of(model), world, options,
                     fit_options);
}

// sample_input: as for plan().
template <typename Construct, typename Sample>
requires(std::is_invocable_v<const Construct&>) Fitted
    fit(const Construct& construct, const Sample& sample_input, const comm::World& world,
        const Options& options, const FitOptions& fit_options = {}) {
  return fit(detail::model_of(construct, sample_input), world, options, fit_options);
}

// criterion, sample_target: as for plan().
template <typename Construct, typename Sample, typename Target, typename Criterion>
requires(std::is_invocable_v<const Construct&>) Fitted
    fit(const Construct& construct, const Sample& sample_input, const Target& sample_target,
        const Criterion& criterion, const comm::World& world, const Options& options,
        const FitOptions& fit_options = {}) {
  return fit(detail::model_of(construct, sample_input, sample_target, criterion), world, options,
             fit_options);
}

}  // namespace zeropage
