// `Pipeline`: a model in stages over ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/TensorBody.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include "zeropage/accumulator.h"
#include "zeropage/detail/model_part.h"
#include "zeropage/distributed_data_parallel.h"
#include "zeropage/schedule.h"
#include "zeropage/world.h"

// A model as a list of layers, which a pipeline cuts into stages.
//
//   PipelineLayers layers = layers_of(sequential);
//   PipelineLayers layers = layers_of(blocks, [](torch::nn::Module& block, const at::Tensor& x) {
//     return block.as<Block>()->forward(x);
//   });
//   layers.insert(layers.begin(), {"embedding", {gpt->token_embedding.ptr()}, [gpt](const at::Tensor& tokens) {...}});
//   layers.front().tensors = {gpt->position_embedding};   // a parameter that the model itself registers
//
// A layer takes what the one before it returns, one tensor. The first one takes the input of a micro-batch.

namespace zeropage {

struct PipelineLayer {
  std::string name = {};  // for errors
  // The model's modules whose parameters and buffers it uses, at any depth. A weight that several layers name is
  // tied.
  std::vector<std::shared_ptr<torch::nn::Module>> modules = {};
  std::function<at::Tensor(const at::Tensor&)> forward = {};
  // Other parameters and buffers that it uses, of a module that also holds those of other layers, such as the model
  // itself.
  std::vector<at::Tensor> tensors = {};
};

using PipelineLayers = std::vector<PipelineLayer>;

// A layer for each module of it, which takes and returns a tensor.
PipelineLayers layers_of(const torch::nn::Sequential& sequential);
// A layer for each element, run by `forward`.
PipelineLayers layers_of(
    const torch::nn::ModuleList& list,
    const std::function<at::Tensor(torch::nn::Module&, const at::Tensor&)>& forward);

// This rank's stages of a model that is cut by layers over the ranks of a pipeline.
//
//   zeropage::Mesh mesh(world, {{"pipeline", 2}, {"data", 4}});
//   auto stage = zeropage::pipeline_stage<Gpt>([&] { return Gpt(config); }, layers_of_gpt, mesh["pipeline"]);
//   zeropage::DistributedDataParallel model(stage, mesh, options);
//   zeropage::Pipeline pipeline(model, {.accumulator = {.micro_steps = 8}});  // zeropage/pipeline.h
//
// The model's constructor runs on each rank without memory (zeropage/distributed_data_parallel.h). Then its values are computed
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
                const operators::ConstructionTape* tape);

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

// Runs the steps of a model that is cut by layers over ranks: micro-batches pass its stages by a schedule
// (zeropage/schedule.h), under sharded data parallelism.
//
//   zeropage::DistributedDataParallel model(stage, mesh, options);        // zeropage/pipeline.h
//   zeropage::Optimizer<torch::optim::AdamW> optimizer(model, ...);
//   zeropage::Pipeline pipeline(model, {.accumulator = {.micro_steps = 8, .clip_norm = 1.0}});
//   pipeline.run(inputs, [&](const at::Tensor& output, int64_t micro_batch) {
//     return criterion(output, targets[micro_batch]);
//   });
//   zeropage::StepReport report = pipeline.accumulator().step(optimizer);
//
// A step's micro-batches are the accumulator's micro-steps, so gradients, their mean, precision, the loss scale, clipping
// and skipped steps are as without a pipeline (zeropage/accumulator.h), and norms and verdicts are over all stages. With
// parameters in whole and no tied weight the bits are those of the same model on one rank with as many micro-steps.
//
// A schedule that splits the backward (kZeroBubble) computes the gradient of a stage's input first and those of its
// parameters later (accumulate/split_backward.h), with as many matrix products and the same bits. The first stage has no
// input's gradient, so all of its backward is the later half. Recompute is refused: each half would repeat the forward.
//
// ZeRO: at stage 3 each pass of a micro-batch through a stage gathers its pages, and of a
// split backward each half that reads them. Reshard::kAfterStep keeps them for the
// step instead: a gather a step, and all pages of the stage in memory.
//
// Another number of micro-batches takes another Pipeline, since the schedule and the buffers for messages are for one. It
// begins with a loss scale and norms of its own; those of the one before are values that it takes over:
//
//   next.accumulator().loss_scaler() = pipeline.accumulator().loss_scaler();
//
// Lifetime: the model outlives it. Threads: the training thread. Collective: construction, run(), evaluate(), loss().
// Throws this rank's error, with the stage and the action in front. The other ranks of the pipeline throw too, and
// name this rank and its error. The step is dropped on all of them, so a script that catches the error may go on
// with the
// next run(), on all of them. Over a mesh with several ranks along "data" or "tensor" all ranks of the mesh throw,
// and none can continue.
struct PipelineOptions {
  // kInterleaved needs PipelineStageOptions::chunks of 2 or more, the others 1.
  parallel::ScheduleKind schedule = parallel::ScheduleKind::kOneForwardOneBackward;
  // micro_steps: micro-batches of a step.
  AccumulatorOptions accumulator = {};
  // Runs a stage's forward, for example under an ActivationScope; empty: it is called as it is.
  std::function<at::Tensor(const std::function<at::Tensor()>& forward)> run_forward = {};
};

class Pipeline {
 public:
  using Model = DistributedDataParallel<std::shared_ptr<PipelineStage>>;
  // The loss of the last stage's output, one element (Accumulator::backward()). Called on the last rank.
  using Loss = std::function<at::Tensor(const at::Tensor& output, int64_t micro_batch)>;
  // Called on the last rank, with the last stage's output.
  using Visit = std::function<void(const at::Tensor& output, int64_t micro_batch)>;

  // Throws where the schedule cannot run with so many micro-batches, or is not the stage's.
  Pipeline(Model& model, const PipelineOptions& options);
  ~Pipeline();
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  // Runs forward and backward of a step's micro-batches. Throws if the run before was not stepped. inputs: of each
  // micro-batch, on the first rank; those of other ranks are not read.
  // weights: of each micro-batch, on the last rank, as Accumulator::backward() takes them; empty: 1.
  void run(const std::vector<at::Tensor>& inputs, const Loss& loss,
           const std::vector<double>& weights = {});
  // Forward alone, without gradients, of any number of micro-batches.
  void evaluate(const std::vector<at::Tensor>& inputs, int64_t micro_batches, const Visit& visit);

  // Its step ends what run() began.
  Accumulator& accumulator();
  // The mean loss of the last run, of this rank's place along the other axes; the same on all stages. fp64 [].
  at::Tensor loss() const;

  // For a simulated world, where no message says it: the sizes and dtype of what passes from stage to stage.
  void expect_activations(const std::vector<int64_t>& sizes, at::ScalarType dtype);
  // What the ranks of the pipeline did in the last run(), in seconds since the first of them began; ranks of one host have
  // one clock. An action begins when the message that it waits for is there. On an accelerator: what the host did.
  // Collective.
  parallel::TimedStep timed_step() const;
  // What this rank has sent to other stages.
  comm::Traffic sent() const;
  int64_t micro_batches() const;

 private:
  struct Parts;

  const std::unique_ptr<Parts> parts_;
};

// Access to the whole model, of which a rank has some stages.
// Calls visit(name, values) for every parameter of the model, in its order, a tied one under each of its names; values:
// whole, until visit returns, the same on all ranks. Where ranks have slices of parameters, each sees the values of
// its own. Sends each parameter to all ranks of the pipeline. Collective.
void visit_whole_model(const Pipeline::Model& model,
                       const std::function<void(const std::string&, const at::Tensor&)>& visit);

}  // namespace zeropage
