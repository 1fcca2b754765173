// The states of a page's fused runs, as they are saved and loaded.
//
// Lifetime: the runs outlive it. Threads: that of the update.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>

#include "zero/update/fused_runs.h"

namespace zeropage::zero {

template <optim::HasFusedStep AlgorithmOptions>
class SavedRuns {
 public:
  using VisitState = PageUpdate::VisitState;

  explicit SavedRuns(FusedRuns<AlgorithmOptions>& runs) : runs_(runs) {}

  // PageUpdate's.
  void visit_states(StateAccess access, const VisitState& visit) {
    runs_.make_states();
    std::vector<Loaded> unfrozen;
    for (size_t run = 0; run < runs_.all().size(); ++run) {
      if (!runs_.all()[run].frozen) {
        visit_run(runs_.all()[run], access, visit);
        continue;
      }
      Loaded loaded = visit_frozen(run, visit);
      if (!runs_.all()[run].frozen) unfrozen.push_back(std::move(loaded));
    }
    if (access != StateAccess::kWrite) return;
    runs_.make_states();
    for (const Loaded& loaded : unfrozen) take_all(loaded);
    runs_.note_loaded();
  }

 private:
  struct Loaded {
    size_t run;
    std::vector<OwnedState> states;  // by shard of the run
  };

  void visit_run(const FusedRun& run, StateAccess access, const VisitState& visit) {
    const auto names = optim::state_names(runs_.options(run));
    for (size_t i = run.first_shard; i < run.end_shard; ++i) {
      FusedShard& shard = runs_.shards()[i];
      OwnedState state{.parameter = shard.parameter, .range = shard.range, .steps = shard.steps};
      for (size_t index = 0; index < names.size(); ++index) {
        state.tensors.push_back({names[index], access == StateAccess::kDescribe
                                                   ? described(run, shard.range.numel())
                                                   : values(run, shard.range, index)});
      }
      visit(state);
      if (access != StateAccess::kWrite) continue;
      shard.steps = state.steps;
      if (run.format != StateFormat::k8Bit) continue;
      for (size_t index = 0; index < names.size(); ++index) {
        take(run, run.range, index, state.tensors[index].values);
      }
    }
  }

  // Visits frozen parameters, of which nothing is saved. A file that has states of one makes it a parameter that
  // steps.
  Loaded visit_frozen(size_t number, const VisitState& visit) {
    const FusedRun& run = runs_.all()[number];
    Loaded loaded{.run = number, .states = {}};
    for (size_t i = run.first_shard; i < run.end_shard; ++i) {
      const FusedShard& shard = runs_.shards()[i];
      OwnedState& state = loaded.states.emplace_back();
      state = {.parameter = shard.parameter, .range = shard.range, .takes_others = true};
      visit(state);
      if (!state.tensors.empty() || state.steps > 0) runs_.unfreeze(number);
    }
    return loaded;
  }

  void take_all(const Loaded& loaded) {
    const FusedRun& run = runs_.all()[loaded.run];
    const auto names = optim::state_names(runs_.options(run));
    for (size_t i = 0; i < loaded.states.size(); ++i) {
      FusedShard& shard = runs_.shards()[run.first_shard + i];
      shard.steps = loaded.states[i].steps;
      for (const auto& [name, values] : loaded.states[i].tensors) {
        const auto at = std::find(names.begin(), names.end(), name);
        if (at == names.end()) continue;
        take(run, shard.range, static_cast<size_t>(at - names.begin()), values);
      }
    }
  }

  static at::Tensor described(const FusedRun& run, int64_t numel) {
    const auto dtype = run.format == StateFormat::kBf16 ? at::kBFloat16 : at::kFloat;
    return at::empty({numel}, at::TensorOptions(at::kMeta).dtype(dtype));
  }

  // The states of a shard: their memory, or fp32 of what is in 8 bits; such a run has one shard.
  at::Tensor values(const FusedRun& run, const Range& range, size_t index) const {
    const at::Tensor states = runs_.states_of(run, range, index);
    if (run.format != StateFormat::k8Bit) return states;
    return optim::dequantised_state(sign(run, index), states, runs_.scales_of(run, index),
                                    run.place.first_in_block);
  }

  void take(const FusedRun& run, const Range& range, size_t index, const at::Tensor& values) const {
    const at::Tensor states = runs_.states_of(run, range, index);
    if (run.format == StateFormat::k8Bit) {
      const at::Tensor wide = values.to(states.device(), at::kFloat);
      optim::quantise_state(sign(run, index), wide, run.place.first_in_block, states,
                            runs_.scales_of(run, index));
    } else {
      states.copy_(values);
    }
  }

  optim::StateSign sign(const FusedRun& run, size_t index) const {
    return optim::state_sign(runs_.options(run), index);
  }

  FusedRuns<AlgorithmOptions>& runs_;
};

}  // namespace zeropage::zero
