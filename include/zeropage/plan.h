// `plan()`: bytes and seconds of a setting before it runs.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <c10/core/ScalarType.h>
#include <torch/optim/adamw.h>

#include "zeropage/accumulator.h"
#include "zeropage/checkpoint.h"
#include "zeropage/detail/tensor_structure.h"
#include "zeropage/device.h"
#include "zeropage/distributed_data_parallel.h"
#include "zeropage/ledger.h"
#include "zeropage/optimizer.h"
#include "zeropage/options.h"
#include "zeropage/simulation.h"
#include "zeropage/world.h"

// How fast a machine is at what a training step does, for the seconds that a plan predicts (planning/step_time.h).
//
// Measured in a few seconds: a matrix product, an element-wise operator, a pass over memory, messages between two
// ranks of this host, and a disk. Of one thread, so that any number of threads and ranks can be predicted.
//
// Cached in a file, by the processor, the dtype and LibTorch's release: $XDG_CACHE_HOME/zeropage, or
// ~/.cache/zeropage. A figure that is not in it is measured and added.
//
// Threads: any; measure with nothing else running. Throws c10::Error for a file that is not what this
// writes; one that cannot be written is said on stderr, and measured again next time.

namespace zeropage::parallel {
enum class ContextForm : uint8_t;
}  // namespace zeropage::parallel

namespace zeropage {

// Speeds of one thread; 0: not known.
struct MachineSpeeds {
  double product_flops_per_second = 0;      // of matrix products
  double elementwise_bytes_per_second = 0;  // read and written by an operator such as GELU
  double memory_bytes_per_second = 0;  // read and written by a pass over more than the caches hold
  comm::Link link = {};                // between ranks of a host
  double disk_read_bytes_per_second = 0;  // of the folder that was asked for
  double disk_write_bytes_per_second = 0;
  int cores = 0;

  bool known() const { return product_flops_per_second > 0; }
};

struct MachineSpeedsOptions {
  // Dtype of parameters and activations.
  c10::ScalarType dtype = c10::kFloat;
  // A folder on the disk to measure; "": none is. Not cached, since folders may be anywhere.
  std::string folder = {};
  // The file; "": in the user's cache. "none": neither read nor written.
  std::string cache = {};
};

// The speeds in the cache; measured where it has none.
MachineSpeeds machine_speeds(const MachineSpeedsOptions& options = {});
// Measured now.
MachineSpeeds measure_machine(const MachineSpeedsOptions& options = {});

// "32 GFLOP/s of products, 9.1 GiB/s element by element, ... a thread".
std::string to_string(const MachineSpeeds& speeds);

// What a plan is asked for and what it tries (zeropage/plan.h). Values.
// The segments in which the allocator of a device has its memory (memory/expandable_segments.h).
enum class AllocatorSegments : uint8_t {
  kExpandable,  // LibTorch's CUDA allocator, with expandable_segments:True
  kFixed,       // and with expandable_segments:False
  kNone,        // each tensor by itself, as on a host
};
// "expandable", "fixed", "none".
std::string_view name(AllocatorSegments segments);

// What is taken of a device besides what tensors ask for.
struct DeviceAllocator {
  AllocatorSegments segments = AllocatorSegments::kExpandable;
  memory::ProductWorkspaces workspaces = {};  // unset: not known, and none are counted
};

// What a run gets. Bytes; 0: not known, and nothing is refused for it.
struct WorldDescription {
  int ranks = 1;           // 1 to comm::kMostSimulatedRanks
  int ranks_per_host = 8;  // at most; the last host may have fewer
  // Neighbouring ranks that have some of each sample's tokens (zeropage/context_parallel.h), and how attention runs over them.
  // A sample that is planned has a rank's tokens alone: 1 / context of the sequence, a multiple of 2.
  int context = 1;
  parallel::ContextForm context_form = {};  // the ring
  // Ranks that have some of the experts of each layer, to which tokens travel (zeropage/expert_parallel.h). They have other samples.
  // Tokens are planned as if they were spread over experts evenly.
  int expert = 1;
  // The memory of a rank's device, as far as LibTorch's allocator may reserve it.
  int64_t device_memory_bytes = 0;
  // Memory of a host, for all of its ranks.
  int64_t host_memory_bytes = 0;
  int64_t nvme_bytes = 0;
  // Ranks train in the memory of their host: what is on the device counts there too.
  bool device_is_host = false;
  // The allocator of a device that is not the host.
  DeviceAllocator allocator = {};

  // Whether there is an allocator between tensors and the device's memory.
  bool has_allocator() const {
    return !device_is_host && allocator.segments != AllocatorSegments::kNone;
  }
  // What a rank may have of the tier.
  int64_t bytes_of_rank(memory::Tier tier) const;
};

// Which activations are computed again in backward.
enum class CheckpointPolicy : uint8_t {
  kNone,
  kSelective,  // cheap operators (zeropage/recompute.h)
  kBlocks,     // each block
};
// "none", "selective", "blocks".
std::string_view name(CheckpointPolicy policy);

// How pages come and go. The bits do not depend on it.
struct PagingSetting {
  int64_t page_bytes = Options::kPageBytesOfDevice;  // unset: of the training's options
  int64_t prefetch_bytes =
      Options::kTwoLargestPages;      // where the stage shards parameters; unset: likewise
  StepWhen step = StepWhen::kInStep;  // where the optimizer has left the device

  bool operator==(const PagingSetting&) const = default;
};

// One way to train the model.
struct PlannedSetting {
  Stage stage = {};
  memory::Tier optimizer = memory::Tier::kDevice;   // OffloadOptions::optimizer
  memory::Tier parameters = memory::Tier::kDevice;  // OffloadOptions::parameters
  CheckpointPolicy checkpointing = CheckpointPolicy::kNone;
  // Which of PlanOptions::paging it has, in their order.
  size_t paging_index = 0;
  PagingSetting paging = {};
};
// "stage 2, optimizer on host, checkpoint blocks".
std::string to_string(const PlannedSetting& setting);

// The options of a training with that setting. training: all that settings have in common; what it says of
// sharded parameters goes where the stage shards none. A folder on NVMe is not filled in.
Options options_of(const Options& training, const PlannedSetting& setting);

// What plan() needs to know of a training script. M: as in DistributedDataParallel<M>.
template <typename M>
struct ModelToPlan {
  // Makes the module, as for a DeferredModule: its parameters get no values. Called several times.
  std::function<M()> construct = {};
  // Forward and loss of one micro-batch: one element in fp32. Inputs are to be on the meta device.
  std::function<at::Tensor(DistributedDataParallel<M>& model)> loss = {};
  // Makes regions of that many of the module's blocks (zeropage/checkpoint.h). Empty: it has
  // none, and CheckpointPolicy::kBlocks recomputes the blocks that find_blocks() finds (zeropage/recompute.h).
  std::function<void(M& module, checkpointing::EveryBlocks every)> checkpoint_blocks = {};
  // Empty: AdamW.
  std::function<std::unique_ptr<ShardedOptimizer>(DistributedDataParallel<M>& model)> optimizer =
      {};
};

namespace detail {

// A model in its simulated world, for plan().
struct PlannedModel {
  std::shared_ptr<DistributedDataParallelBase> model = {};
  std::unique_ptr<ShardedOptimizer> optimizer = {};
  std::function<at::Tensor()> loss = {};
  std::function<void(checkpointing::EveryBlocks every)> checkpoint_blocks = {};
};

// mark: gives the module what the world that is described asks for: attention over ranks, and its part of the experts.
using MakePlannedModel = std::function<PlannedModel(
    const comm::Mesh& mesh, const std::function<void(torch::nn::Module& module)>& mark,
    const Options& options)>;

}  // namespace detail

// What a run will hold, send and compute, before it runs: for each stage, offload and checkpoint
// policy, and which of them is the cheapest that fits.
//
//   const zeropage::Plan plan = zeropage::plan(
//       [&] { return Gpt(config); }, torch::empty({4, 2048}, torch::kInt64),
//       {.ranks = 64, .device_memory_bytes = 80_GiB});
//   std::cout << plan;
//
// No formula computes the figures. The module is constructed without values, and
// the training code itself runs a few steps of one rank of a simulated world with it: pages,
// collectives, recompute and the optimizer, on tensors that have sizes and no memory. The ledger has what they
// would hold (memory/meta_memory.h), and the communicator counts what they would send.
//
// The figures also have what LibTorch's CUDA allocator reserves for these tensors: the same requests go to a model
// of it (planning/caching_allocator.h). A limit of the device is compared with that.
//
// What is not in the figures: what the process has besides tensors, such as code and a driver's
// context, and what kernels take while they compute.
//
// Cost: seconds and some 100 MB, whatever the size of the model and the number of ranks. It draws
// nothing from the random generators.
// Threads: any, that has no OperatorInterceptor of its own.
// Throws c10::Error for descriptions that make no sense, and what the module throws: an
// operator without a form on the meta device (operators/meta_operators.h), a forward that reads values.
struct PlanOptions {
  // What all settings have in common, such as precision, page_bytes and shard_within. Its stage and what it
  // offloads do not matter: those are what is tried.
  Options training = {};
  // Micro-batches of a step on each rank, and when their gradients are reduced (AccumulatorOptions).
  int64_t micro_steps = 1;
  ReduceMicroSteps reduce = ReduceMicroSteps::kAuto;
  int64_t gradient_budget_bytes = 0;
  // Where the optimizer may be; at stage 3 the parameters go along, or not. Optimizers without a fused form
  // stay on the device.
  std::vector<memory::Tier> tiers = {memory::Tier::kDevice, memory::Tier::kHost,
                                     memory::Tier::kNvme};
  // The stages to try, by their numbers.
  std::vector<int> stages = {0, 1, 2, 3};
  std::vector<CheckpointPolicy> policies = {CheckpointPolicy::kNone, CheckpointPolicy::kSelective,
                                            CheckpointPolicy::kBlocks};
  // The ModuleLists and Sequentials whose blocks CheckpointPolicy::kBlocks recomputes, by name. Empty: the module's own, where
  // it is clear which (find_blocks() in zeropage/recompute.h); else Plan::without_blocks says why that policy was not tried.
  std::vector<std::string> blocks = {};
  // How fast the machines are, for the seconds of a step; by default not known.
  MachineSpeeds speeds = {};
  int threads = 0;  // of a rank; 0: its part of the host's cores
  // What to try of pages, the preferred first. Later ones are tried only while nothing fits that keeps all on
  // the device and computes nothing again.
  std::vector<PagingSetting> paging = {PagingSetting()};
};

// What rank 0 of a world will hold and do; it has the most where shards differ.
struct Forecast {
  PlannedSetting setting = {};
  // What lives from step to step, by the byte plan (zero/plan/byte_plan.h).
  memory::TierBytes held = {};
  // Each tier by kind, at the moment when its total is highest.
  memory::TierBytes at_peak = {};
  // The most that the device's allocator reserves, below its limit if that is enough. 0: each tensor is allocated
  // by itself, or no steps were run.
  int64_t reserved_bytes = 0;
  // When the gradients of micro-steps are reduced, and why. Empty: no steps were run.
  std::optional<MicroStepReduction> reduction = {};
  // In one step, after the first.
  comm::LinkTraffic sent = {};
  // FLOPs of the rank in one step: matrix products, convolutions and attention, two for a multiply-add.
  // Backward counts twice forward; what is recomputed counts again.
  double flops = 0;
  // Predicted seconds of a step (planning/step_time.h); 0 where PlanOptions::speeds are not known.
  double seconds = 0;
  // By tier: how much more than there is. What is on the device counts to the host, where that is the device.
  std::array<int64_t, memory::kTierCount> missing_bytes{};

  bool fits() const;
  // At the peak; of the device what is reserved, of the host with what is on the device, where that is the host.
  int64_t used_bytes(const WorldDescription& described, memory::Tier tier) const;
};

struct Plan {
  int64_t parameters = 0;  // elements of the module, a tied one once
  int64_t micro_steps = 1;
  WorldDescription world = {};
  // Whether steps were run. If not, forecasts are of what is held from step to step, and at the peak of gradients
  // too, and of nothing more.
  bool has_steps = true;
  // The cheapest first. Where speeds are known that is the fastest, with less than 5 % no difference. Then what keeps more on the device before what offloads, the host before NVMe; then
  // fewer FLOPs; then fewer bytes sent, where less than 2 % are no difference; then less that is
  // computed again; then what comes first in PlanOptions::paging; then fewer bytes on the device. Those that do
  // not fit have their places too.
  std::vector<Forecast> forecasts = {};
  // Which blocks CheckpointPolicy::kBlocks recomputes, "the 12 of "h"", and the names of what holds them. Empty: those of
  // ModelToPlan::checkpoint_blocks, or none was tried.
  std::string blocks = {};
  std::vector<std::string> lists_of_blocks = {};
  // Why that policy was not tried although it was asked for. Empty: it was.
  std::string without_blocks = {};

  // The cheapest that fits, and the next cheapest. Null: there is none.
  const Forecast* choice() const;
  const Forecast* next_best() const;
  // The one that exceeds its limits least, if none fits. Throws for a plan without forecasts.
  const Forecast& nearest() const;

  // The table, the choice by kind, what limits it, and the next best.
  std::string to_string() const;
};
std::ostream& operator<<(std::ostream& out, const Plan& plan);

namespace detail {

// Whose business blocks are: find_blocks(), or ModelToPlan::checkpoint_blocks.
enum class Blocks : uint8_t { kAreFound, kAreRegions };

Plan plan(const MakePlannedModel& make, Blocks blocks, const WorldDescription& world,
          const PlanOptions& options);

// The tensor with its sizes and strides alone; where fewer samples are planned (planning/fewer_samples.h), with as many.
at::Tensor without_values(const at::Tensor& tensor);

// given: outlives what this makes.
template <typename M>
MakePlannedModel make_planned(const ModelToPlan<M>& given) {
  return [&given](const comm::Mesh& mesh, const auto& mark, const Options& options) {
    DeferredModule<M> deferred(given.construct);
    mark(*deferred.module());
    const auto model =
        std::make_shared<DistributedDataParallel<M>>(std::move(deferred), mesh, options);
    return PlannedModel{
        .model = model,
        .optimizer = given.optimizer ? given.optimizer(*model)
                                     : std::make_unique<Optimizer<torch::optim::AdamW>>(*model),
        .loss = [&given, model] { return given.loss(*model); },
        .checkpoint_blocks =
            [&given, model](auto every) { given.checkpoint_blocks(model->module(), every); }};
  };
}
template <typename M>
Blocks blocks_of(const ModelToPlan<M>& model) {
  return model.checkpoint_blocks ? Blocks::kAreRegions : Blocks::kAreFound;
}

// The mean, as a loss that was guessed. warns: says so once, since one over classes keeps more.
at::Tensor mean_of(const at::Tensor& output, bool warns);

// Sizes alone of the tensors in a sample.
template <typename Sample>
Sample sample_without_values(const Sample& sample, const char* name) {
  const auto on_meta = [](const at::Tensor& tensor, const std::string&) {
    return without_values(tensor);
  };
  return memory::map_tensors(sample, on_meta, name);
}

// What plan() takes of a module whose loss is that of what forward gives.
template <typename Construct, typename Sample, typename Loss>
auto model_of(const Construct& construct, const Sample& sample_input, const Loss& loss) {
  using M = std::invoke_result_t<const Construct&>;
  const auto input = sample_without_values(sample_input, "sample_input");
  const auto forward = [input](DistributedDataParallel<M>& model) {
    const auto now = sample_without_values(input, "sample_input");
    if constexpr (std::is_same_v<Sample, at::Tensor>) {
      return model(now);
    } else {
      return std::apply(model, now);
    }
  };
  return ModelToPlan<M>{.construct = construct,
                        .loss = [forward, loss](DistributedDataParallel<M>& model) -> at::Tensor {
                          return loss(forward(model));
                        },
                        .checkpoint_blocks = {},
                        .optimizer = {}};
}

// The loss is the mean of what forward gives, which is said where a sample has integers.
template <typename Construct, typename Sample>
auto model_of(const Construct& construct, const Sample& sample_input) {
  bool warns = false;
  const auto look = [&warns](const at::Tensor& tensor, const std::string&) {
    warns |= tensor.defined() && at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false);
    return tensor;
  };
  memory::map_tensors(sample_input, look, "sample_input");
  return model_of(construct, sample_input,
                  [warns](const at::Tensor& output) { return mean_of(output, warns); });
}

template <typename Construct, typename Sample, typename Target, typename Criterion>
auto model_of(const Construct& construct, const Sample& sample_input, const Target& sample_target,
              const Criterion& criterion) {
  const auto target = sample_without_values(sample_target, "sample_target");
  return model_of(construct, sample_input, [criterion, target](const auto& output) -> at::Tensor {
    return criterion(output, sample_without_values(target, "sample_target"));
  });
}

}  // namespace detail

template <typename M>
Plan plan(const ModelToPlan<M>& model, const WorldDescription& world,
          const PlanOptions& options = {}) {
  return detail::plan(detail::make_planned(model), detail::blocks_of(model), world, options);
}

// A plan for a module of which only the number of fp32 parameters is known: what is held from step to step, and gradients
// besides at the peak, by ZeRO's formula (Rajbhandari et al. 2020, figure 1). Activations, pages, traffic and FLOPs are not in
// it. states: of the optimizer, for each parameter; AdamW has 2.
Plan plan_states(int64_t parameters, int64_t states, const WorldDescription& world,
                 const PlanOptions& options = {});

// sample_input: a micro-batch of a rank, whose values do not matter: what forward takes, a tensor or a
// std::tuple. forward gives one tensor, and the loss is its mean. Most losses keep more: over 8,192 classes a plan without
// the loss is 19 % too low. So give it, as below; where forward takes integers, this form says so on stderr.
template <typename Construct, typename Sample>
requires(std::is_invocable_v<const Construct&>) Plan
    plan(const Construct& construct, const Sample& sample_input, const WorldDescription& world,
         const PlanOptions& options = {}) {
  return plan(detail::model_of(construct, sample_input), world, options);
}

// The same with the loss: criterion(forward's output, sample_target) is a tensor of one element.
//
//   plan(construct, tokens, targets,
//        [](const at::Tensor& logits, const at::Tensor& next) {
//          return torch::nn::functional::cross_entropy(logits.flatten(0, 1), next.flatten());
//        }, {.ranks = 64});
template <typename Construct, typename Sample, typename Target, typename Criterion>
requires(std::is_invocable_v<const Construct&>) Plan
    plan(const Construct& construct, const Sample& sample_input, const Target& sample_target,
         const Criterion& criterion, const WorldDescription& world,
         const PlanOptions& options = {}) {
  return plan(detail::model_of(construct, sample_input, sample_target, criterion), world, options);
}

}  // namespace zeropage
