// The wrapped model and its optimizer.
#pragma once

#include <memory>
#include <vector>

#include <torch/torch.h>

#include "bench/train_gpt/flags.h"
#include "bench/train_gpt/places.h"
#include "bench/train_gpt/text_data.h"
#include "examples/byte_gpt/gpt.h"
#include "zeropage/context_parallel.h"
#include "zeropage/expert_parallel.h"
#include "zeropage/pipeline.h"
#include "zeropage/zeropage.h"

namespace train_gpt {

using Model = zeropage::DistributedDataParallel<Gpt>;

struct MadeModel {
  std::unique_ptr<Model> model;
  std::vector<zeropage::PlacedExperts> experts;  // by layer; empty: all ranks have all of them
};

// How attention runs over --context.
zeropage::parallel::ContextForm context_form_of(const Flags& flags);
// The module that the flags describe, with values from the seed, not wrapped.
Gpt construct_gpt(const Flags& flags);
// Collective.
MadeModel make_model(const Places& places, const Flags& flags);
// Elements of the whole module, of which a rank may have slices.
int64_t parameters_of(const Flags& flags);
// Those that a token meets.
int64_t active_parameters_of(const Flags& flags);
std::unique_ptr<zeropage::ShardedOptimizer> make_optimizer(const Flags& flags, Model& model);
std::unique_ptr<zeropage::ShardedOptimizer> make_optimizer(const Flags& flags,
                                                           zeropage::Pipeline::Model& model);
// This rank's stages of it, with --pipeline. Collective.
zeropage::Pipeline::Model make_stages(const Places& places, const Flags& flags);

// A micro-batch on the meta device.
Batch batch_without_values(const Flags& flags);
torch::Tensor loss_of(Model& model, const Batch& batch);
// The same, and in training the losses of balance that spread tokens over experts.
torch::Tensor training_loss_of(Model& model, const Batch& batch);
double mean_over_ranks(const zeropage::comm::World& world, double value);

}  // namespace train_gpt
