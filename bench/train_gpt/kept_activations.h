// What decides over a run which activations stay until backward: what the flags say, around each
// forward and its loss.
#pragma once

#include <optional>
#include <string>

#include "bench/train_gpt/checkpoint_flags.h"
#include "bench/train_gpt/model.h"
#include "zeropage/activation_offload.h"
#include "zeropage/recompute.h"

namespace train_gpt {

class KeptActivations {
 public:
  // Outlives no model; graphs may outlive it.
  KeptActivations(const CheckpointFlags& flags, const zeropage::comm::World& world,
                  const zeropage::DistributedDataParallelBase& model);

  // While it lives, the flags hold for the calling thread.
  class Forward {
   public:
    explicit Forward(KeptActivations& of);

   private:
    std::optional<zeropage::checkpointing::ActivationScope> recompute_;
    std::optional<zeropage::checkpointing::ActivationScope> offload_;
  };

  // By the plan for a budget, once there is one. None where what is kept leaves.
  std::optional<int64_t> forecast_peak_bytes() const;
  // The most that lay on the host, as it was offloaded.
  int64_t offloaded_peak_bytes() const;
  // What the plan drops, and what was offloaded; "" if neither.
  std::string table() const;

 private:
  std::optional<zeropage::checkpointing::Recompute> recompute_;  // nothing: no flag asks for it
  std::optional<zeropage::checkpointing::ActivationOffload> offload_;
};

}  // namespace train_gpt
