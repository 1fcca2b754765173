#include "bench/train_gpt/kept_activations.h"

#include <utility>

#include "zeropage/activation_offload.h"
#include "zeropage/recompute.h"

namespace train_gpt {

using zeropage::checkpointing::RecomputeOptions;

KeptActivations::KeptActivations(const CheckpointFlags& flags, const zeropage::comm::World& world,
                                 const zeropage::DistributedDataParallelBase& model) {
  if (flags.policy != CheckpointFlags::Policy::kBlocks) {
    RecomputeOptions options = flags.policy == CheckpointFlags::Policy::kBudget
                                   ? RecomputeOptions::budget(flags.budget_bytes)
                                   : RecomputeOptions::selective();
    recompute_ = zeropage::recompute(model, std::move(options));
  }
  if (flags.offload != CheckpointFlags::Offload::kNone) {
    zeropage::checkpointing::ActivationOffloadOptions options;
    if (flags.offload == CheckpointFlags::Offload::kFolder) {
      options.store = std::make_shared<zeropage::NvmeActivations>(zeropage::NvmeActivationsOptions{
          .directory = flags.offload_folder, .rank = world.rank()});
    }
    offload_.emplace(options);
    offload_->stay_here(model.parameters());
    offload_->stay_here(model.buffers());
  }
}

KeptActivations::Forward::Forward(KeptActivations& of) {
  if (of.recompute_) recompute_.emplace(*of.recompute_);
  if (of.offload_) offload_.emplace(*of.offload_);
}

std::optional<int64_t> KeptActivations::forecast_peak_bytes() const {
  return recompute_ && !offload_ ? recompute_->forecast_peak_bytes() : std::nullopt;
}

int64_t KeptActivations::offloaded_peak_bytes() const {
  return offload_ ? offload_->statistics().host_peak_bytes : 0;
}

std::string KeptActivations::table() const {
  std::string text;
  if (recompute_) text += recompute_->plan_table();
  if (offload_) text += to_string(offload_->statistics()) + '\n';
  return text;
}

}  // namespace train_gpt
