#include "bench/train_gpt/fitting.h"

#include <algorithm>

#include "bench/train_gpt/model.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"
#include "zeropage/fit.h"

namespace train_gpt {
namespace {

using zeropage::CheckpointPolicy;
using zeropage::memory::Tier;

// What a process takes besides its tensors: code and libraries, which it has by now, and what LibTorch's kernels
// and threads keep once they have run.
int64_t bytes_besides_tensors() {
  constexpr int64_t kOfKernels = int64_t{96} << 20;
  const int64_t tensors = zeropage::memory::Ledger::process()->now().total();
  return std::max<int64_t>(0, zeropage::memory::resident_bytes() - tensors) + kOfKernels;
}

int64_t largest_over_ranks(const zeropage::World& world, int64_t value) {
  int64_t largest = value;
  for (const std::string& text :
       world.gather_text("what processes take besides tensors", std::to_string(value))) {
    largest = std::max<int64_t>(largest, std::stoll(text));
  }
  return largest;
}

// The limit is of processes, the library's of tensors.
void leave_room_for_processes(const zeropage::World& world, int64_t& limit_bytes) {
  if (limit_bytes == zeropage::Options::kNoLimit || world.device().is_meta()) return;
  const int64_t besides = world.local_size() * largest_over_ranks(world, bytes_besides_tensors());
  ZP_CHECK(limit_bytes > besides, "--host-memory ", zeropage::memory::format_bytes(limit_bytes),
           ": the processes of a host take ", zeropage::memory::format_bytes(besides),
           " of it for code, libraries and kernels alone; raise it");
  limit_bytes -= besides;
}

bool may_step_in_backward(const Flags& flags) {
  return !flags.accumulator.clip_norm && !flags.accumulator.norm_spikes &&
         flags.forms.loss_scale == "auto" && flags.dtype() != torch::kHalf;
}

zeropage::FitOptions fit_options_of(const Flags& flags) {
  zeropage::FitOptions options{.micro_steps = flags.accumulator.micro_steps,
                               .reduce = flags.accumulator.reduce,
                               .gradient_budget_bytes = flags.accumulator.gradient_budget_bytes,
                               .context = flags.context,
                               .expert = flags.experts.parallel,
                               .context_form = context_form_of(flags),
                               .nvme_directory = flags.fit.nvme_directory,
                               .nvme_bytes = flags.fit.nvme_bytes,
                               .may_step_in_backward = may_step_in_backward(flags)};
  constexpr int64_t kBuffersOfASave = int64_t{16} << 20;
  if (flags.state.saves()) options.besides_bytes = kBuffersOfASave;
  if (flags.fit.stage) options.stages = {*flags.fit.stage};
  if (flags.fit.has_policy) {
    options.policies = {flags.checkpointing.text == "none"        ? CheckpointPolicy::kNone
                        : flags.checkpointing.text == "selective" ? CheckpointPolicy::kSelective
                                                                  : CheckpointPolicy::kBlocks};
  }
  if (flags.simulates_cuda()) options.allocator = allocator_of_simulated_cuda();
  if (flags.optimizer == "sgd" && flags.dtype() == torch::kFloat64) options.tiers = {Tier::kDevice};
  return options;
}

// A rank's tokens of each sample.
Batch own_batch_without_values(const Flags& flags) {
  const Batch whole = batch_without_values(flags);
  const auto own = [length = flags.model.sequence / flags.context](const torch::Tensor& tokens) {
    return tokens.narrow(1, 0, length).contiguous();
  };
  return {own(whole.inputs), own(whole.targets)};
}

zeropage::ModelToPlan<Gpt> model_to_plan(const Flags& flags) {
  return {.construct = [&flags] { return construct_gpt(flags); },
          .loss = [batch = own_batch_without_values(flags)](
                      Model& model) { return training_loss_of(model, batch); },
          .checkpoint_blocks =
              [](Gpt& gpt, zeropage::checkpointing::EveryBlocks every) {
                CheckpointFlags checkpointing;
                checkpointing.every = every;
                gpt->run_blocks_by(block_loop(checkpointing));
              },
          .optimizer = [&flags](Model& model) { return make_optimizer(flags, model); }};
}

std::string word_of(Tier tier, const std::string& folder) {
  if (tier == Tier::kDevice) return "none";
  return tier == Tier::kHost ? "host" : "nvme:" + folder;
}

}  // namespace

zeropage::DeviceAllocator allocator_of_simulated_cuda() {
  return {.workspaces = zeropage::memory::kWorkspacesOfSm90};
}

std::string fit_to_limits(const zeropage::World& world, Flags& flags) {
  zeropage::Options& options = flags.options;
  leave_room_for_processes(world, options.host_memory_bytes);
  if (flags.memory_rungs > 0) return "";
  if (options.device_memory_bytes == zeropage::Options::kNoLimit &&
      options.host_memory_bytes == zeropage::Options::kNoLimit) {
    return "";
  }
  const zeropage::Fitted fitted =
      zeropage::fit(model_to_plan(flags), world, options, fit_options_of(flags));
  options = fitted.options;
  flags.checkpointing.parse_policy(std::string(name(fitted.checkpointing)));
  flags.forms.offload_optimizer =
      word_of(options.offload.optimizer, options.offload.nvme_directory);
  flags.forms.offload_parameters =
      word_of(options.offload.parameters, options.offload.nvme_directory);
  return fitted.description;
}

int64_t parts_on(int rung) {
  constexpr int kMostHalvings = 30;
  return int64_t{1} << std::clamp(rung - 2, 0, kMostHalvings);
}

void take_less_memory(Flags& flags, int rung) {
  if (rung == 0) return;
  flags.checkpointing.parse_policy(rung == 1 ? "selective" : "blocks");
  flags.batch /= parts_on(rung);
  flags.accumulator.micro_steps *= parts_on(rung);
}

}  // namespace train_gpt
