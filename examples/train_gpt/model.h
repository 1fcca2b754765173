// The wrapped model, its optimizer and a step of it, as a real and a simulated run have them.
#pragma once

#include <memory>

#include <torch/torch.h>

#include "examples/train_gpt/flags.h"
#include "examples/train_gpt/gpt.h"
#include "examples/train_gpt/places.h"
#include "examples/train_gpt/text_data.h"
#include "zero/zeropage.h"

namespace train_gpt {

using Model = zeropage::DistributedDataParallel<Gpt>;

// Collective.
Model make_model(const Places& places, const Flags& flags);
// Elements of the whole module, of which a rank may have slices.
int64_t parameters_of(const GptConfig& config);
std::unique_ptr<zeropage::ShardedOptimizer> make_optimizer(const Flags& flags, Model& model);

// A micro-batch on the meta device.
Batch batch_without_values(const Flags& flags);
torch::Tensor loss_of(Model& model, const Batch& batch);
double mean_over_ranks(const zeropage::comm::World& world, double value);

}  // namespace train_gpt
