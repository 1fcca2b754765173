// The parameters of a page whose update is fused: runs of shards that lie one behind the other, and where their states are.
//
// Lifetime: the part outlives it. Threads: that of the update.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/ops/zeros.h>

#include "base/exact.h"
#include "optim/fused_step.h"
#include "optim/quantised_states.h"
#include "zero/update/page_update.h"
#include "zero/update/state_blocks.h"

namespace zeropage::zero {

struct FusedShard {
  size_t parameter;
  size_t run;
  Range range;                // in the owned part
  int64_t steps = 0;          // made so far
  bool stepped_last = false;  // in the last step
};

// Where states are smaller than fp32, of one shard.
struct FusedRun {
  size_t group;
  Range range;  // in the owned part
  size_t first_shard = 0;
  size_t end_shard = 0;
  StateFormat format;
  optim::StretchPlace place;  // of the first shard
  bool frozen = false;        // its shards were when they were added, and never stepped
  std::optional<size_t> block = std::nullopt;  // that has its states
  int64_t first_state = 0;                     // there
  int64_t first_scale = 0;
};

template <optim::HasFusedStep AlgorithmOptions>
class FusedRuns {
 public:
  explicit FusedRuns(const OwnedPart& part) : part_(part), states_(part) {}

  void add_groups(std::vector<OwnedGroup> groups) {
    const size_t first_added = runs_.size();
    for (OwnedGroup& group : groups) {
      add_runs(group.shards);
      options_.push_back(static_cast<const AlgorithmOptions&>(*group.options));
    }
    // A file has its size before the first step.
    const bool all_now = part_.states != nullptr && !part_.states->stays();
    make_blocks(first_added, runs_.size(), all_now);
    ++version_;
  }

  void set_options(size_t group, const torch::optim::OptimizerOptions& options) {
    options_[group] = static_cast<const AlgorithmOptions&>(options);
  }
  const AlgorithmOptions& options(const FusedRun& run) const { return options_[run.group]; }

  const std::vector<FusedRun>& all() const { return runs_; }
  // Run by run. Their steps and gradients are the update's to note.
  std::vector<FusedShard>& shards() { return shards_; }
  const std::vector<FusedShard>& shards() const { return shards_; }

  void visit_memory(const VisitMemory& visit) const { states_.visit_memory(visit); }

  // Changes with the runs and their states, and with note_loaded().
  uint64_t version() const { return version_; }
  // Steps of shards were set, and not made.
  void note_loaded() { ++version_; }
  // One of its shards steps, or has states in a file.
  void unfreeze(size_t run) { runs_[run].frozen = false; }

  // Makes the states of all runs that are not frozen, as many as the options want now.
  void make_states() {
    make_blocks(0, runs_.size(), /*frozen_too=*/false);
    for (size_t block = 0; block < blocks_.size(); ++block) {
      const size_t wanted = optim::state_names(options_[blocks_[block].group]).size();
      if (states_.states(block).size() >= wanted) continue;
      states_.extend(block, beginning_of(blocks_[block]));
      ++version_;
    }
  }

  // All that is in the run's block.
  const std::vector<at::Tensor>& states_beside(const FusedRun& run) const {
    return states_.states(*run.block);
  }
  // range: of the run, in the owned part.
  at::Tensor states_of(const FusedRun& run, const Range& range, size_t index) const {
    return states_beside(run)[index].narrow(0, first_state(run, range), range.numel());
  }
  int64_t first_state(const FusedRun& run, const Range& range) const {
    return run.first_state + range.begin - run.range.begin;
  }
  // The scales of a run's 8-bit states.
  at::Tensor scales_of(const FusedRun& run, size_t index) const {
    return states_.scales(*run.block)[index].narrow(
        0, run.first_scale, blocks_of(run.place.first_in_block, run.range.numel()));
  }

 private:
  // States begin alike in as many elements as the values that they belong to, so that a device loads both at once.
  static constexpr int64_t kAlignmentNumel = 16;

  // What the states of one block are of.
  struct Block {
    size_t group;
    StateFormat format;
  };

  void add_runs(const std::vector<ParameterShard>& shards) {
    int64_t end_with_padding = -1;
    for (const ParameterShard& shard : shards) {
      if (shard.range.empty()) continue;
      const bool is_fp32 = shard.state_format == StateFormat::kFp32;
      const bool follows =
          shard.range.begin == end_with_padding && is_fp32 && runs_.back().frozen == shard.frozen;
      end_with_padding = is_fp32 ? shard.range.end + shard.padding : -1;
      if (!follows) runs_.push_back(run_from(shard));
      shards_.push_back(
          {.parameter = shard.parameter, .run = runs_.size() - 1, .range = shard.range});
      runs_.back().end_shard = shards_.size();
      runs_.back().range.end = shard.range.end;
    }
  }

  // An empty one in the group that is being added.
  FusedRun run_from(const ParameterShard& shard) const {
    return {.group = options_.size(),
            .range = {shard.range.begin, shard.range.begin},
            .first_shard = shards_.size(),
            .end_shard = shards_.size(),
            .format = shard.state_format,
            .place = {.seed = part_.rounding_seed,
                      .parameter = shard.parameter,
                      .first_element = shard.first_element,
                      // The owned part begins where a block of the page does.
                      .first_in_block = shard.range.begin % kStateBlockNumel},
            .frozen = shard.frozen};
  }

  // Makes the states of runs [first, end) that have none, by group and format.
  void make_blocks(size_t first, size_t end, bool frozen_too) {
    struct Sizes {
      int64_t numel = 0;
      int64_t scales = 0;
      std::vector<size_t> runs = {};
    };
    std::map<std::pair<size_t, StateFormat>, Sizes> blocks;
    for (size_t index = first; index < end; ++index) {
      FusedRun& run = runs_[index];
      if (run.block || (run.frozen && !frozen_too)) continue;
      Sizes& sizes = blocks[{run.group, run.format}];
      run.first_state =
          base::round_up(sizes.numel, kAlignmentNumel) + run.range.begin % kAlignmentNumel;
      run.first_scale = sizes.scales;
      sizes.numel = run.first_state + run.range.numel();
      sizes.scales += blocks_of(run.place.first_in_block, run.range.numel());
      sizes.runs.push_back(index);
    }
    for (const auto& [kind, sizes] : blocks) {
      const size_t block = states_.add(sizes.numel, sizes.scales);
      blocks_.push_back({kind.first, kind.second});
      for (const size_t index : sizes.runs) runs_[index].block = block;
      states_.extend(block, beginning_of(blocks_[block]));
      ++version_;
    }
  }

  StateBlocks::Beginning beginning_of(const Block& block) const {
    const AlgorithmOptions& options = options_[block.group];
    const at::Tensor value = at::zeros({1}, at::kFloat);
    StateBlocks::Beginning beginning{.states = optim::make_states(options, value, block.format)};
    if (block.format == StateFormat::k8Bit) {
      beginning.scales = optim::make_scales(options, value, /*first_in_block=*/0);
    }
    return beginning;
  }

  const OwnedPart& part_;
  StateBlocks states_;
  std::vector<Block> blocks_;              // of states_
  std::vector<AlgorithmOptions> options_;  // by group
  std::vector<FusedRun> runs_;
  std::vector<FusedShard> shards_;
  uint64_t version_ = 0;
};

}  // namespace zeropage::zero
