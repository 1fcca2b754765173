// This rank's stages of a model that is cut by layers over the ranks of a pipeline.
//
//   zeropage::Mesh mesh(world, {{"pipeline", 2}, {"data", 4}});
//   auto stage = zeropage::pipeline_stage<Gpt>([&] { return Gpt(config); }, layers_of_gpt, mesh["pipeline"]);
//   zeropage::DistributedDataParallel model(stage, mesh, options);
//   zeropage::Pipeline pipeline(model, {.accumulator = {.micro_steps = 8}});  // zero/pipeline/pipeline.h
//
// The model's constructor runs on each rank without memory (zero/deferred_module.h). Then its values are computed
// in the constructor's order, with its random numbers, and a rank keeps those of its own layers. They are the bits
// of the model that one rank constructs, if the constructor is seeded. So a rank holds its stages' parameters, and
// for a moment one other.
//
// The stage has the model's names: "blocks.3.up.weight" has that name on the rank that has it. Parameters of other
// ranks have no values; a layer of this rank that uses one throws.
//
// A weight that layers of the first and of the last rank use is tied: both have it, and its gradients are added up
// once a step. The first rank's counts in norms. Other ranks cannot share one. A buffer may be used on any ranks, if
// no layer writes it: each has it, and a state on disk has the first one's.
//
// The training mode is the model's: train() and eval() of the stage reach the model that layers have captured, and
// all of its modules.
//
// Lifetime: a torch::nn::Module as others; shares the model. Threads: the training thread. Collective over the pipeline.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "comm/world.h"
#include "zero/deferred_module.h"
#include "zero/layout/model_part.h"
#include "zero/pipeline/layers.h"

namespace zeropage {

struct PipelineStageOptions {
  // Stages of each rank. Stage s is chunk s / ranks of rank s % ranks.
  int chunks = 1;
  // The first layer of each stage: ranks x chunks numbers that begin with 0 and rise. Empty: stages get equally
  // many layers, some one more.
  std::vector<int64_t> first_layers = {};
};

class PipelineStage final : public torch::nn::Module, public HasModelPart {
 public:
  // whole: the model, with values or without; layers: of it. tape: of its construction; null where it has values, or
  // where it shall have none.
  // Collective over ranks. Throws on all ranks alike where the layers cannot be cut so, a stage would have no
  // parameter, a parameter is in no layer, a layer lists what is not the model's or a module that holds another rank's,
  // or more than the first and the last rank would share a parameter.
  PipelineStage(std::shared_ptr<torch::nn::Module> whole, PipelineLayers layers,
                const comm::World& ranks, const PipelineStageOptions& options,
                const memory::ConstructionTape* tape);

  // Throws where a layer wrote to a buffer that other ranks have too.
  at::Tensor forward(int chunk, const at::Tensor& input);

  void train(bool on = true) override;
  bool is_training() const noexcept override { return whole_->is_training(); }

  int chunks() const { return chunks_; }
  int stages() const { return chunks_ * part_->ranks.size(); }
  const comm::World& ranks() const { return part_->ranks; }
  std::shared_ptr<const ModelPart> model_part() const override { return part_; }

 private:
  const std::shared_ptr<torch::nn::Module> whole_;  // of other ranks it has no values
  const int chunks_;
  const PipelineLayers layers_;              // those of other ranks have no values
  const std::vector<int64_t> first_layers_;  // [stages + 1]
  const std::shared_ptr<const ModelPart> part_;
  std::vector<std::pair<std::string, at::Tensor>> shared_buffers_;  // that other ranks have too
};

// construct: makes the model; layers: of a model. M: a module holder or a std::shared_ptr to a module.
template <typename M>
std::shared_ptr<PipelineStage> pipeline_stage(const std::function<M()>& construct,
                                              const std::function<PipelineLayers(M&)>& layers,
                                              const comm::World& ranks,
                                              const PipelineStageOptions& options = {}) {
  DeferredModule<M> deferred(construct);
  return std::make_shared<PipelineStage>(deferred.module()->shared_from_this(),
                                         layers(deferred.module()), ranks, options,
                                         &deferred.tape());
}

}  // namespace zeropage
