// A model that trains for a few steps in a simulated world under one stage and offload, to see what that takes.
//
// Lifetime: what `make` refers to outlives it. Threads: one, whose ledger is the trial's while a
// method runs.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "planning/allocation_record.h"
#include "zero/plan/byte_plan.h"
#include "zeropage/accumulator.h"
#include "zeropage/plan.h"
#include "zeropage/recompute.h"
#include "zeropage/simulation.h"

namespace zeropage::planning {

// Figures of rank 0, in a step after the first.
struct StepFigures {
  memory::TierBytes at_peak;
  // Forecast::reserved_bytes, and by how much that is more than there is.
  int64_t reserved_bytes = 0;
  int64_t missing_reserved_bytes = 0;
  comm::LinkTraffic sent;
  double forward_flops = 0;  // known to CheckpointPolicy::kSelective, which sees all operators
  double recomputed_flops = 0;
  double forward_bytes =
      0;  // that forward's other operators read and write; known to CheckpointPolicy::kNone
};

class Trial {
 public:
  // options: of the training, with stage and offload.
  Trial(const detail::MakePlannedModel& make, const WorldDescription& world, const Options& options,
        const AccumulatorOptions& accumulation);
  ~Trial();
  Trial(const Trial&) = delete;
  Trial& operator=(const Trial&) = delete;

  int64_t parameters() const;
  const MicroStepReduction& reduction() const;
  // From step to step, by a byte plan: of these options, or of others that shard alike.
  memory::TierBytes held(const Options& options) const;
  // Elements that this rank updates.
  int64_t updated_numel() const;
  // Buffers on the host through which what is on NVMe passes.
  int64_t buffer_bytes() const;
  // CheckpointPolicy::kBlocks recomputes those of these lists from here on, or those that are found. Throws where none are.
  const checkpointing::ModuleBlocks& find_blocks(const std::vector<std::string>& lists);
  StepFigures run(CheckpointPolicy policy);

 private:
  struct Parts;

  void tell_reserved(StepFigures& figures);

  const WorldDescription described_;
  const std::shared_ptr<memory::Ledger> ledger_;
  const std::shared_ptr<AllocationRecord> allocations_;
  const std::unique_ptr<Parts> parts_;
  // What was allocated before the steps of a policy, and is still there.
  std::vector<AllocationChange> held_;
  bool has_stepped_ = false;
  std::optional<checkpointing::ModuleBlocks> blocks_;  // none: the script's own regions
};

}  // namespace zeropage::planning
