#include "zero/update/fused_update.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "memory/ledger.h"
#include "offload/fused_step.h"
#include "offload/quantised_states.h"
#include "zero/optimizer_traits.h"

namespace zeropage {
namespace {

// Parameters that lie one after the other, are in one group and have made as many steps are updated
// together: what lies between them is zero and stays so. Where states are smaller than fp32, a
// parameter is updated by itself: their bits follow from the elements' places in it.
template <offload::HasFusedStep AlgorithmOptions>
class FusedUpdate final : public PageUpdate {
 public:
  explicit FusedUpdate(OwnedPart part) : part_(std::move(part)) {}

  void add_groups(std::vector<OwnedGroup> groups) override {
    for (OwnedGroup& group : groups) {
      int64_t end_with_padding = -1;
      for (const ParameterShard& shard : group.shards) {
        if (shard.range.empty()) continue;
        const bool is_fp32 = shard.state_format == offload::StateFormat::kFp32;
        const bool follows =
            shard.range.begin == end_with_padding && is_fp32 && runs_.back().frozen == shard.frozen;
        end_with_padding = is_fp32 ? shard.range.end + shard.padding : -1;
        if (!follows) runs_.push_back(run_from(shard));
        runs_.back().shards.push_back({shard.parameter, shard.range});
        runs_.back().range.end = shard.range.end;
      }
      group_options_.push_back(static_cast<const AlgorithmOptions&>(*group.options));
    }
    // A file has its size before the first step.
    const bool all_now = part_.states != nullptr && !part_.states->stays();
    for (Run& run : runs_) {
      if (!run.frozen || all_now) make_states(run);
    }
  }

  void set_options(size_t group, const torch::optim::OptimizerOptions& options) override {
    group_options_[group] = static_cast<const AlgorithmOptions&>(options);
  }

  void visit_states(StateAccess access, const VisitState& visit) override {
    for (Run& run : runs_) {
      if (run.frozen) {
        visit_frozen(run, access, visit);
        continue;
      }
      make_states(run);
      for (Shard& shard : run.shards) {
        OwnedState state{.parameter = shard.parameter, .range = shard.range, .steps = shard.steps};
        const auto names = offload::state_names(group_options_[run.group]);
        for (size_t index = 0; index < names.size(); ++index) {
          state.tensors.push_back({names[index], access == StateAccess::kDescribe
                                                     ? described_state(run, shard.range.numel())
                                                     : state_values(run, shard.range, index)});
        }
        visit(state);
        if (access != StateAccess::kWrite) continue;
        shard.steps = state.steps;
        if (run.format != offload::StateFormat::k8Bit) continue;
        for (size_t index = 0; index < names.size(); ++index) {
          offload::quantise_state(state_sign(run, index), state.tensors[index].values,
                                  run.place.first_in_block, run.states[index], run.scales[index]);
        }
      }
    }
  }

  // Each shard counts its steps.
  void set_updates(int64_t /*updates*/) override {}

  bool reads_found_inf() const override { return true; }
  void uncount_step() override {
    for (Run& run : runs_) {
      for (Shard& shard : run.shards) shard.steps -= std::exchange(shard.stepped_last, 0);
    }
  }

  void step(const at::Tensor& gradient, const HasGradient& has_gradient,
            const offload::GradientFactors& factors) override {
    for (Run& run : runs_) {
      for (Shard& shard : run.shards) {
        shard.stepped_last = has_gradient(shard.parameter) ? 1 : 0;
        if (shard.stepped_last != 0) run.frozen = false;
      }
      if (run.frozen) continue;
      make_states(run);
      for (size_t first = 0; first < run.shards.size();) {
        if (run.shards[first].stepped_last == 0) {
          ++first;
          continue;
        }
        size_t end = first;
        const int64_t steps = run.shards[first].steps;
        while (end < run.shards.size() && run.shards[end].steps == steps &&
               run.shards[end].stepped_last != 0) {
          ++run.shards[end++].steps;
        }
        update(run, {run.shards[first].range.begin, run.shards[end - 1].range.end}, gradient,
               steps + 1, factors);
        first = end;
      }
    }
  }

 private:
  struct Shard {
    size_t parameter;
    Range range;               // in the owned part
    int64_t steps = 0;         // made so far
    int64_t stepped_last = 0;  // how many of them in the last step(): 0 or 1
  };
  struct Run {
    size_t group;
    Range range;  // in the owned part
    std::vector<Shard> shards = {};
    offload::StateFormat format;
    offload::StretchPlace place;          // of the first shard
    bool frozen = false;                  // its shards were when they were added, and never stepped
    std::vector<at::Tensor> states = {};  // [range.numel()] each
    std::vector<at::Tensor> scales = {};  // of 8-bit states
  };

  // An empty one in the group that is being added.
  Run run_from(const ParameterShard& shard) const {
    return {.group = group_options_.size(),
            .range = {shard.range.begin, shard.range.begin},
            .format = shard.state_format,
            .place = {.seed = part_.rounding_seed,
                      .parameter = shard.parameter,
                      .first_element = shard.first_element,
                      // The owned part begins where a block of the page does.
                      .first_in_block = shard.range.begin % offload::kStateBlockNumel},
            .frozen = shard.frozen};
  }

  // Nothing is saved of them. A file that has states of one makes it one that steps.
  void visit_frozen(Run& run, StateAccess access, const VisitState& visit) {
    std::vector<OwnedState> loaded;
    for (const Shard& shard : run.shards) {
      OwnedState& state = loaded.emplace_back();
      state = {.parameter = shard.parameter, .range = shard.range, .takes_others = true};
      visit(state);
      if (!state.tensors.empty() || state.steps > 0) run.frozen = false;
    }
    if (access != StateAccess::kWrite || run.frozen) return;
    make_states(run);
    const auto names = offload::state_names(group_options_[run.group]);
    for (size_t i = 0; i < loaded.size(); ++i) {
      run.shards[i].steps = loaded[i].steps;
      for (const auto& [name, values] : loaded[i].tensors) {
        const auto at = std::find(names.begin(), names.end(), name);
        if (at == names.end()) continue;
        take_state(run, run.shards[i].range, static_cast<size_t>(at - names.begin()), values);
      }
    }
  }

  void take_state(const Run& run, const Range& range, size_t index,
                  const at::Tensor& values) const {
    if (run.format == offload::StateFormat::k8Bit) {
      const at::Tensor wide = values.to(run.states[index].device(), at::kFloat);
      offload::quantise_state(state_sign(run, index), wide, run.place.first_in_block,
                              run.states[index], run.scales[index]);
    } else {
      state_values(run, range, index).copy_(values);
    }
  }

  static at::Tensor within(const at::Tensor& flat, const Range& range) {
    return flat.defined() ? flat.narrow(0, range.begin, range.numel()) : flat;
  }

  offload::StateSign state_sign(const Run& run, size_t index) const {
    return offload::state_sign(group_options_[run.group], index);
  }

  static at::Tensor described_state(const Run& run, int64_t numel) {
    const auto dtype = run.format == offload::StateFormat::kBf16 ? at::kBFloat16 : at::kFloat;
    return at::empty({numel}, at::TensorOptions(at::kMeta).dtype(dtype));
  }

  // Of a shard: its memory, or fp32 of what is in 8 bits; such a run has one shard.
  at::Tensor state_values(const Run& run, const Range& range, size_t index) const {
    const at::Tensor& states = run.states[index];
    if (run.format == offload::StateFormat::k8Bit) {
      return offload::dequantised_state(state_sign(run, index), states, run.scales[index],
                                        run.place.first_in_block);
    }
    return states.narrow(0, range.begin - run.range.begin, range.numel());
  }

  // Options that change may need more states.
  void make_states(Run& run) const {
    const AlgorithmOptions& options = group_options_[run.group];
    if (run.states.size() >= offload::state_names(options).size()) return;
    if (part_.states != nullptr) return make_states_in_tier(run);
    const memory::KindScope state(memory::Kind::kOptimizerState);
    const at::Tensor values = within(part_.values, run.range);
    extend(run.states, offload::make_states(options, values, run.format));
    if (run.format != offload::StateFormat::k8Bit) return;
    extend(run.scales, offload::make_scales(options, values, run.place.first_in_block));
  }

  // Those that there are stay.
  static void extend(std::vector<at::Tensor>& old, std::vector<at::Tensor> made) {
    std::copy(old.begin(), old.end(), made.begin());
    old = std::move(made);
  }

  // All elements of a state begin alike, so one tells what they are.
  void make_states_in_tier(Run& run) const {
    const AlgorithmOptions& options = group_options_[run.group];
    const auto in_tier = [&](const at::Tensor& example, int64_t numel) {
      return part_.states->add(part_.page, numel, example.scalar_type(), example[0].item<double>(),
                               memory::Kind::kOptimizerState);
    };
    const at::Tensor value = at::zeros({1}, at::kFloat);
    const auto states = offload::make_states(options, value, run.format);
    for (size_t index = run.states.size(); index < states.size(); ++index) {
      run.states.push_back(in_tier(states[index], run.range.numel()));
    }
    if (run.format != offload::StateFormat::k8Bit) return;
    const auto scales = offload::make_scales(options, value, /*first_in_block=*/0);
    const int64_t blocks = offload::blocks_of(run.place.first_in_block, run.range.numel());
    for (size_t index = run.scales.size(); index < scales.size(); ++index) {
      run.scales.push_back(in_tier(scales[index], blocks));
    }
  }

  void update(const Run& run, const Range& range, const at::Tensor& gradient, int64_t step,
              const offload::GradientFactors& factors) const {
    offload::Stretch stretch{.values = within(part_.values, range),
                             .gradient = within(gradient, range),
                             .copy_out = within(part_.copy_out, range),
                             .states = {},
                             .remainders = within(part_.remainders, range),
                             .place = run.place,
                             .adopts_copy = part_.adopts_copy};
    for (size_t index = 0; index < offload::state_names(group_options_[run.group]).size();
         ++index) {
      stretch.states.push_back(
          run.states[index].narrow(0, range.begin - run.range.begin, range.numel()));
      if (!run.scales.empty()) stretch.scales.push_back(run.scales[index]);
    }
    offload::fused_step(group_options_[run.group], step, stretch, factors);
  }

  const OwnedPart part_;
  std::vector<AlgorithmOptions> group_options_;
  std::vector<Run> runs_;
};

template <typename AlgorithmOptions>
std::shared_ptr<const FusedForm> form_of(const AlgorithmOptions& defaults) {
  return std::make_shared<const FusedForm>(
      FusedForm{.make =
                    [](OwnedPart part) {
                      return std::make_unique<FusedUpdate<AlgorithmOptions>>(std::move(part));
                    },
                .states = static_cast<int64_t>(offload::state_names(defaults).size())});
}

}  // namespace

namespace detail {

std::shared_ptr<const FusedForm> fused_form(const torch::optim::AdamWOptions& defaults) {
  return form_of(defaults);
}
std::shared_ptr<const FusedForm> fused_form(const torch::optim::AdamOptions& defaults) {
  return form_of(defaults);
}
std::shared_ptr<const FusedForm> fused_form(const torch::optim::SGDOptions& defaults) {
  return form_of(defaults);
}
std::shared_ptr<const FusedForm> fused_form(const torch::optim::AdagradOptions& defaults) {
  return form_of(defaults);
}
std::shared_ptr<const FusedForm> fused_form(const LionOptions& defaults) {
  return form_of(defaults);
}

}  // namespace detail
}  // namespace zeropage
