// A small language model that a pipeline cuts, and a run of it over any mesh, or without a pipeline.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "tests/harness/ranks.h"
#include "zeropage/pipeline.h"
#include "zeropage/zeropage.h"

namespace zeropage::pipeline_models {

constexpr int64_t kWidth = 8;
constexpr int64_t kHidden = 12;
constexpr int64_t kVocabulary = 29;
constexpr int64_t kLength = 5;
constexpr int64_t kBatch = 2;

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    up = register_module("up", torch::nn::Linear(kWidth, kHidden));
    down = register_module("down", torch::nn::Linear(kHidden, kWidth));
  }
  torch::Tensor forward(const torch::Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

enum class Head : uint8_t { kOwn, kTied };

// tokens [batch, length] -> logits [batch, length, kVocabulary]
struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(Head of_model, torch::ScalarType dtype, int64_t count = 6) {
    torch::manual_seed(3);
    embedding = register_module("embedding", torch::nn::Embedding(kVocabulary, kWidth));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int64_t block = 0; block < count; ++block) blocks->push_back(Block());
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    if (of_model == Head::kOwn) {
      head = register_module(
          "head", torch::nn::Linear(torch::nn::LinearOptions(kWidth, kVocabulary).bias(false)));
    }
    const torch::NoGradGuard no_grad;
    for (torch::Tensor& parameter : parameters()) parameter.normal_(0, 0.3);
    to(dtype);
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    torch::Tensor x = embedding(tokens);
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return logits(x);
  }
  torch::Tensor logits(const torch::Tensor& x) {
    if (head) return head(norm(x));
    return torch::nn::functional::linear(norm(x), embedding->weight);
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Model);

inline PipelineLayers layers_of_model(Model& model) {
  PipelineLayers layers =
      layers_of(model->blocks, [](torch::nn::Module& block, const torch::Tensor& x) {
        return block.as<BlockImpl>()->forward(x);
      });
  layers.insert(
      layers.begin(),
      {"embedding", {model->embedding.ptr()}, [model](const torch::Tensor& tokens) mutable {
         return model->embedding(tokens);
       }});
  PipelineLayer head{"head", {model->norm.ptr()}, [model](const torch::Tensor& x) mutable {
                       return model->logits(x);
                     }};
  head.modules.push_back(model->head ? std::shared_ptr<torch::nn::Module>(model->head.ptr())
                                     : model->embedding.ptr());
  layers.push_back(head);
  return layers;
}

struct Shape {
  int pipeline = 1;
  int data = 1;
  int tensor = 1;
  int stage = 0;
  parallel::ScheduleKind schedule = parallel::ScheduleKind::kOneForwardOneBackward;
  int chunks = 1;
  int micro_batches = 4;
  Head head = Head::kOwn;
  // In double, or in bfloat16 with a scaled loss.
  bool low_precision = false;

  int ranks() const { return pipeline * data * tensor; }
  torch::ScalarType dtype() const { return low_precision ? torch::kFloat : torch::kDouble; }
  friend std::ostream& operator<<(std::ostream& out, const Shape& shape) {
    return out << "pipeline " << shape.pipeline << ", data " << shape.data << ", tensor "
               << shape.tensor << ", stage " << shape.stage << ", schedule "
               << static_cast<int>(shape.schedule) << ", chunks " << shape.chunks
               << (shape.head == Head::kTied ? ", tied" : "")
               << (shape.low_precision ? ", bfloat16" : "");
  }
};

inline Options options_of(const Shape& shape) {
  constexpr Stage kStages[] = {Stage::kReplicated, Stage::kOptimizerState, Stage::kGradients,
                               Stage::kParameters};
  Options options;
  options.stage = kStages[shape.stage];
  if (shape.low_precision) options.compute_dtype = torch::kBFloat16;
  options.page_bytes = 4096;
  options.update_by = UpdateBy::kClass;
  return options;
}

inline torch::Tensor tokens_of(int64_t sample) {
  return torch::arange(kBatch * kLength)
      .mul(7 * sample + 5)
      .add(sample)
      .remainder(kVocabulary)
      .view({kBatch, kLength});
}

inline torch::Tensor loss_of(const torch::Tensor& logits, int64_t sample) {
  return torch::nn::functional::cross_entropy(
      logits.to(logits.scalar_type() == torch::kDouble ? torch::kDouble : torch::kFloat)
          .view({-1, kVocabulary}),
      tokens_of(sample + 1).view({-1}));
}

// The number of a micro-batch, over steps and the ranks that get other samples.
inline int64_t sample_of(const Shape& shape, int64_t step, int64_t micro_batch, int data_rank) {
  return (step * shape.micro_batches + micro_batch) * shape.data + data_rank;
}

// What a run ends with.
struct Outcome {
  std::vector<double> losses, norms;  // by step
  std::map<std::string, torch::Tensor> weights;
};

inline const TensorParallelPlan& whole_plan() {
  static const TensorParallelPlan plan = {{"blocks.*.up", Cut::column()},
                                          {"blocks.*.down", Cut::row()}};
  return plan;
}

inline AccumulatorOptions accumulator_of(const Shape& shape) {
  AccumulatorOptions options{.micro_steps = shape.micro_batches, .clip_norm = 0.5};
  if (shape.low_precision)
    options.loss_scaler = accumulate::LossScalerOptions{.initial_scale = 1024};
  return options;
}

// Without a pipeline, on shape.data ranks.
inline Outcome train_whole(const Shape& shape, int steps) {
  Outcome outcome;
  std::mutex mutex, construction;
  testing::run_ranks(shape.data, [&](World& world) {
    Model module{nullptr};
    {
      const std::lock_guard lock(construction);
      module = Model(shape.head, shape.dtype());
    }
    DistributedDataParallel<Model> model(module, world, options_of(shape));
    Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(0.01));
    Accumulator accumulator(model, accumulator_of(shape));
    for (int step = 0; step < steps; ++step) {
      for (int micro_batch = 0; micro_batch < shape.micro_batches; ++micro_batch) {
        const int64_t sample = sample_of(shape, step, micro_batch, world.rank());
        accumulator.backward(loss_of(model(tokens_of(sample)), sample));
      }
      const StepReport report = accumulator.step(optimizer);
      const double loss = world.mean(accumulator.loss().item<double>());
      const std::lock_guard lock(mutex);
      if (world.rank() == 0) outcome.losses.push_back(loss), outcome.norms.push_back(report.norm);
    }
    visit_parameters(model, [&](const std::string& name, const torch::Tensor& values) {
      const std::lock_guard lock(mutex);
      if (world.rank() == 0) outcome.weights[name] = values.clone();
    });
  });
  return outcome;
}

// A rank of a run over the whole mesh.
struct PipelineRun {
  PipelineRun(World& world, const Shape& of_run, PipelineOptions options = {})
      : shape(of_run),
        mesh(world, {{"pipeline", shape.pipeline}, {"data", shape.data}, {"tensor", shape.tensor}}),
        model(make_stage(), mesh, options_of(shape)),
        optimizer(model, torch::optim::AdamWOptions(0.01)),
        pipeline(model, with(std::move(options))) {}

  std::shared_ptr<PipelineStage> make_stage() {
    auto stage =
        pipeline_stage<Model>([&] { return Model(shape.head, shape.dtype()); }, &layers_of_model,
                              mesh["pipeline"], {.chunks = shape.chunks});
    if (shape.tensor > 1) tensor_parallel(*stage, mesh["tensor"], whole_plan());
    return stage;
  }
  PipelineOptions with(PipelineOptions options) const {
    options.schedule = shape.schedule;
    options.accumulator = accumulator_of(shape);
    return options;
  }

  StepReport step(int64_t number) { return step(number, pipeline); }
  StepReport step(int64_t number, Pipeline& by) {
    std::vector<torch::Tensor> inputs;
    const auto sample = [&](int64_t micro_batch) {
      return sample_of(shape, number, micro_batch, mesh["data"].rank());
    };
    for (int64_t index = 0; index < shape.micro_batches; ++index) {
      inputs.push_back(tokens_of(sample(index)));
    }
    by.run(inputs, [&](const torch::Tensor& output, int64_t micro_batch) {
      return loss_of(output, sample(micro_batch));
    });
    return by.accumulator().step(optimizer);
  }
  double loss() { return mesh["data"].mean(pipeline.loss().item<double>()); }

  const Shape shape;
  Mesh mesh;
  Pipeline::Model model;
  Optimizer<torch::optim::AdamW> optimizer;
  Pipeline pipeline;
};

// Every rank says its losses and norms; they must be the same ones.
inline std::vector<Outcome> train_pipeline_by_rank(const Shape& shape, int steps) {
  std::vector<Outcome> by_rank(static_cast<size_t>(shape.ranks()));
  testing::run_ranks(shape.ranks(), [&](World& world) {
    PipelineRun run(world, shape);
    Outcome& outcome = by_rank[static_cast<size_t>(world.rank())];
    for (int step = 0; step < steps; ++step) {
      outcome.norms.push_back(run.step(step).norm);
      outcome.losses.push_back(run.loss());
    }
    visit_parameters(run.model, [&](const std::string& name, const torch::Tensor& values) {
      outcome.weights[name] = values.clone();
    });
  });
  return by_rank;
}

}  // namespace zeropage::pipeline_models
