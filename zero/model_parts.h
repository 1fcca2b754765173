// What a ModelRef stands for: the pages and gradients of a model, and of a module its names and buffers.
//
// Lifetime: shares the pages. Threads: the training thread.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include <torch/nn/module.h>

#include "zero/pages/placed_parameters.h"
#include "zero/setup/sharded_model.h"
#include "zeropage/world.h"

namespace zeropage::zero {

class ModelParts {
 public:
  // module: null where nobody knows it, who is an optimizer alone.
  ModelParts(ShardedModel sharded, comm::World all_ranks,
             std::shared_ptr<const torch::nn::Module> module);
  // For an optimizer alone: its parameters get the module's names. Throws if they are none of the module's, or if another
  // optimizer has some of those.
  ModelParts(ShardedModel sharded, const torch::nn::Module& module);

  const ShardedModel& sharded() const { return sharded_; }
  // The ranks that get other samples.
  const comm::World& world() const { return sharded_.pages->world(); }
  // Those, or all of the mesh that the model was wrapped over: a state on disk is one of all these ranks.
  const comm::World& all_ranks() const { return all_ranks_; }

  // The parameters in pages, by the indices that they have there.
  const PlacedParameters& parameters() const {
    return places_.empty() ? sharded_.pages->parameters() : named_;
  }
  // Where such a parameter comes among them in the module's order.
  size_t place(size_t index) const { return places_.empty() ? index : places_[index]; }
  // The module's buffers, each once, and those of its parameters that are in no page: they are the same on all ranks.
  std::vector<NamedParameter> buffers() const;

 private:
  const ShardedModel sharded_;
  const comm::World all_ranks_;
  const std::shared_ptr<const torch::nn::Module> module_;
  PlacedParameters named_;
  std::vector<size_t> places_;  // by index; empty: they are the indices
};

// A module's buffers, each once, with all its names.
std::vector<NamedParameter> buffers_each_once(const torch::nn::Module& module);

}  // namespace zeropage::zero
