// Runs the steps of a model that is cut by layers over ranks: micro-batches pass its stages by a schedule
// (parallel/schedule/schedule.h), under sharded data parallelism.
//
//   zeropage::DistributedDataParallel model(stage, mesh, options);        // zero/pipeline/stage.h
//   zeropage::Optimizer<torch::optim::AdamW> optimizer(model, ...);
//   zeropage::Pipeline pipeline(model, {.accumulator = {.micro_steps = 8, .clip_norm = 1.0}});
//   pipeline.run(inputs, [&](const at::Tensor& output, int64_t micro_batch) {
//     return criterion(output, targets[micro_batch]);
//   });
//   zeropage::StepReport report = pipeline.accumulator().step(optimizer);
//
// A step's micro-batches are the accumulator's micro-steps, so gradients, their mean, precision, the loss scale, clipping
// and skipped steps are as without a pipeline (zero/accumulator.h), and norms and verdicts are over all stages. With
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
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "parallel/schedule/schedule.h"
#include "parallel/schedule/timeline_json.h"
#include "zero/accumulator.h"
#include "zero/distributed_data_parallel.h"
#include "zero/pipeline/stage.h"

namespace zeropage {

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

}  // namespace zeropage
