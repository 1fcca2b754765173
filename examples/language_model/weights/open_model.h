// A model's files into the shards of ranks.
//
//   WrappedModel model = open_model(ModelFiles("SmolLM2-135M"), world, {.sharding = {.stage = zeropage::Stage::kParameters}});
//
// No rank holds the model at any moment: it is constructed without memory, and each rank reads what it owns.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <zeropage/options.h>
#include <zeropage/world.h>

#include "language_model/model/wrapped_model.h"
#include "language_model/weights/model_files.h"

namespace language_model {

struct AdapterTargets {
  AdapterOptions options;
  std::vector<std::string> layers;  // ends of their names, such as "q_proj"
  uint64_t seed = 0;                // of what lora_A is drawn from
};

struct OpenOptions {
  zeropage::Options sharding;
  // New adapters: everything else is frozen.
  std::optional<AdapterTargets> adapters;
  // Adapters that save_adapters() or peft wrote, and their layers; "": none. Not both.
  std::string adapters_from;
  // Neighbouring ranks that have the same rows, and each of them some tokens of those; 1: each rank has whole rows. The world's
  // number of ranks is a multiple.
  int context = 1;
  zeropage::parallel::ContextForm context_form = zeropage::parallel::ContextForm::kRing;
  // Ranks over which each layer's experts are spread (zeropage/expert_parallel.h), neighbours that have other rows; 1: each rank has all.
  // They divide the world's ranks and the experts. Not with adapters, and not with `context`.
  int expert_parallel = 1;
  // For use without training: no parameter has a gradient, nor room for one.
  bool is_frozen = false;
};

// Throws with the names of all tensors that are missing, unexpected or of another shape, before the model is used. Collective.
WrappedModel open_model(const ModelFiles& files, const zeropage::comm::World& world,
                        const OpenOptions& options = {});
// With weights that are drawn from `seed`: to train from the beginning.
WrappedModel new_model(const ModelConfig& config, uint64_t seed, const zeropage::comm::World& world,
                       const OpenOptions& options = {});

}  // namespace language_model
