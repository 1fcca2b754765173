// Updates in one pass over memory (offload/fused_step): the formulas of the torch::optim class,
// rounded otherwise, with the same bits on the host and on CUDA.
//
// Parameters that lie one after the other, are in one group and have made as many steps are updated
// together: what lies between them is zero and stays so.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "memory/ledger.h"
#include "offload/fused_step.h"
#include "zero/page_update.h"

namespace zeropage {

template <offload::HasFusedStep AlgorithmOptions>
class FusedUpdate final : public PageUpdate {
 public:
  explicit FusedUpdate(OwnedPart part) : part_(std::move(part)) {}

  void add_groups(std::vector<OwnedGroup> groups) override {
    for (OwnedGroup& group : groups) {
      int64_t end_with_padding = -1;
      for (const OwnedSlice& slice : group.slices) {
        if (slice.range.empty()) continue;
        if (slice.range.begin != std::exchange(end_with_padding, slice.range.end + slice.padding)) {
          runs_.push_back({group_options_.size(), {slice.range.begin, slice.range.begin}});
        }
        runs_.back().slices.push_back({slice.parameter, slice.range});
        runs_.back().range.end = slice.range.end;
      }
      group_options_.push_back(static_cast<const AlgorithmOptions&>(*group.options));
    }
    for (Run& run : runs_) make_states(run);
  }

  void set_options(size_t group, const torch::optim::OptimizerOptions& options) override {
    group_options_[group] = static_cast<const AlgorithmOptions&>(options);
  }

  void step(const HasGradient& has_gradient, double factor) override {
    for (Run& run : runs_) {
      make_states(run);
      for (size_t first = 0; first < run.slices.size();) {
        if (!has_gradient(run.slices[first].parameter)) {
          ++first;
          continue;
        }
        size_t end = first;
        const int64_t steps = run.slices[first].steps;
        while (end < run.slices.size() && run.slices[end].steps == steps &&
               has_gradient(run.slices[end].parameter)) {
          ++run.slices[end++].steps;
        }
        update(run, {run.slices[first].range.begin, run.slices[end - 1].range.end}, steps + 1,
               factor);
        first = end;
      }
    }
  }

 private:
  struct Slice {
    size_t parameter;
    Range range;        // in the owned part
    int64_t steps = 0;  // made so far
  };
  struct Run {
    size_t group;
    Range range;  // in the owned part
    std::vector<Slice> slices;
    std::vector<at::Tensor> states;  // [range.numel()] each
  };

  static at::Tensor within(const at::Tensor& flat, const Range& range) {
    return flat.defined() ? flat.narrow(0, range.begin, range.numel()) : flat;
  }

  // Options that change may need more states.
  void make_states(Run& run) const {
    const AlgorithmOptions& options = group_options_[run.group];
    if (run.states.size() >= offload::state_names(options).size()) return;
    auto states = part_.states != nullptr ? states_at_home(options, run.range.numel())
                                          : states_beside(options, run.range);
    std::copy(run.states.begin(), run.states.end(), states.begin());
    run.states = std::move(states);
  }

  std::vector<at::Tensor> states_beside(const AlgorithmOptions& options, const Range& range) const {
    const memory::KindScope state(memory::Kind::kOptimizerState);
    return offload::make_states(options, within(part_.values, range));
  }

  std::vector<at::Tensor> states_at_home(const AlgorithmOptions& options, int64_t numel) const {
    std::vector<at::Tensor> states;
    for (size_t index = 0; index < offload::state_names(options).size(); ++index) {
      states.push_back(part_.states->add(part_.page, numel, at::kFloat,
                                         offload::initial_state(options),
                                         memory::Kind::kOptimizerState));
    }
    return states;
  }

  void update(const Run& run, const Range& range, int64_t step, double factor) const {
    offload::Stretch stretch{within(part_.values, range), within(part_.gradient, range),
                             within(part_.copy_out, range)};
    for (size_t index = 0; index < offload::state_names(group_options_[run.group]).size();
         ++index) {
      stretch.states.push_back(
          run.states[index].narrow(0, range.begin - run.range.begin, range.numel()));
    }
    offload::fused_step(group_options_[run.group], step, stretch, {.scale = factor});
  }

  const OwnedPart part_;
  std::vector<AlgorithmOptions> group_options_;
  std::vector<Run> runs_;
};

}  // namespace zeropage
