// How scripts cut a model by its layers over ranks.
#include "checkpointing/checkpoint.h"
#include "tests/habits/scripts.h"
#include "zero/pipeline/pipeline.h"

namespace zeropage::habits_of_pipelines {
namespace {

using namespace zeropage::testing;

constexpr const char* kGroup = "Pipelines";
constexpr int64_t kMicroBatches = 4;

PipelineLayers layers_of_mlp(Mlp& mlp) {
  const auto squashed = [](torch::nn::Linear linear) {
    return [linear](const torch::Tensor& x) mutable { return torch::tanh(linear(x)); };
  };
  return {{"first", {mlp->first.ptr()}, squashed(mlp->first)},
          {"second", {mlp->second.ptr()}, squashed(mlp->second)},
          {"last", {mlp->last.ptr()}, [last = mlp->last](const torch::Tensor& x) mutable {
             return last(x);
           }}};
}

using Change = std::function<void(PipelineLayers&)>;

std::shared_ptr<PipelineStage> stage_of(const World& ranks, const Change& change = {},
                                        const PipelineStageOptions& options = {}) {
  return pipeline_stage<Mlp>([] { return Mlp(); },
                             [&](Mlp& mlp) {
                               PipelineLayers layers = layers_of_mlp(mlp);
                               if (change) change(layers);
                               return layers;
                             },
                             ranks, options);
}

// A step of two ranks.
void run_step(const World& world, const Change& change, std::vector<torch::Tensor> inputs,
              const PipelineOptions& options = {.accumulator = {.micro_steps = kMicroBatches}},
              const PipelineStageOptions& stages = {}) {
  const Mesh mesh(world, {{"pipeline", 2}, {"data", 1}});
  Pipeline::Model model(stage_of(mesh["pipeline"], change, stages), mesh);
  Pipeline pipeline(model, options);
  pipeline.run(inputs, [](const torch::Tensor& output, int64_t) { return output.square().mean(); });
}

std::vector<torch::Tensor> inputs_of(int64_t count) {
  return std::vector<torch::Tensor>(static_cast<size_t>(count), torch::ones({3, 7}));
}

// Each refusal holds whatever is sharded.
const RefusedOptions kOnce = {.stages = {1}};

const int kWhole = is_refused(
    kGroup, "wraps a whole module over a mesh with an axis \"pipeline\"",
    "the module is no stage of a pipeline", "make it by pipeline_stage()",
    [](auto& run) {
      const Mesh mesh(run.world(), {{"pipeline", 2}, {"data", 1}});
      const DistributedDataParallel<Mlp> model(make<Mlp>(), mesh);
    },
    kOnce);

const int kNoParameters = is_refused(
    kGroup, "cuts a model so that a stage has no parameter", "stage 1 of 2 would have no parameter",
    "give it a layer that has some",
    [](auto& run) {
      run_step(run.world(),
               [](PipelineLayers& layers) {
                 layers.push_back({"twice", {}, [](const torch::Tensor& x) { return 2 * x; }});
               },
               inputs_of(kMicroBatches), {.accumulator = {.micro_steps = kMicroBatches}},
               {.first_layers = {0, 3}});
    },
    kOnce);

const int kForgotten = is_refused(
    kGroup, "leaves a layer's module out of the list of what it uses", "is in no layer",
    "list it in PipelineLayer::modules",
    [](auto& run) {
      run_step(
          run.world(), [](PipelineLayers& layers) { layers[1].modules.clear(); },
          inputs_of(kMicroBatches));
    },
    kOnce);

const int kFew = is_refused(
    kGroup, "runs a pipeline by fewer micro-batches than the schedule needs", "1f1b",
    "use more micro-batches, or GPipe",
    [](auto& run) { run_step(run.world(), {}, inputs_of(1), {.accumulator = {.micro_steps = 1}}); },
    kOnce);

const int kSizes = is_refused(
    kGroup, "gives a pipeline micro-batches of different sizes",
    "as at the first micro-batch of the step", "pad them, or drop the rest of a batch",
    [](auto& run) {
      std::vector<torch::Tensor> inputs = inputs_of(kMicroBatches);
      inputs[2] = torch::ones({2, 7});
      run_step(run.world(), {}, inputs);
    },
    kOnce);

const int kIndices = is_refused(
    kGroup, "cuts a model where indices pass from layer to layer",
    "which has no gradient to send back", "cut it where activations pass",
    [](auto& run) {
      run_step(
          run.world(),
          [](PipelineLayers& layers) {
            layers[1].forward = [forward = layers[1].forward](const torch::Tensor& x) {
              return forward(x).argmax(-1);
            };
          },
          inputs_of(kMicroBatches));
    },
    kOnce);

const int kTwice = is_refused(
    kGroup, "runs a pipeline twice without a step between", "the run before was not stepped",
    "call accumulator().step() after each run()",
    [](auto& run) {
      const Mesh mesh(run.world(), {{"pipeline", 2}, {"data", 1}});
      Pipeline::Model model(stage_of(mesh["pipeline"]), mesh);
      Pipeline pipeline(model, {.accumulator = {.micro_steps = kMicroBatches}});
      for (int step = 0; step < 2; ++step) {
        pipeline.run(inputs_of(kMicroBatches),
                     [](const torch::Tensor& output, int64_t) { return output.square().mean(); });
      }
    },
    kOnce);

const int kRepeated = is_refused(
    kGroup, "recomputes activations under a zero-bubble schedule",
    "would do in each half of the backward", "keep the activations, or use 1F1B",
    [](auto& run) {
      run_step(run.world(),
               [](PipelineLayers& layers) {
                 for (PipelineLayer& layer : layers) {
                   layer.forward = [forward = layer.forward](const torch::Tensor& x) {
                     return checkpointing::checkpoint(forward, x);
                   };
                 }
               },
               inputs_of(kMicroBatches),
               {.schedule = parallel::ScheduleKind::kZeroBubble,
                .accumulator = {.micro_steps = kMicroBatches}});
    },
    kOnce);

// ---- tied weights, and stages of other dtypes ----

struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    embedding = register_module("embedding", torch::nn::Embedding(11, 8));
    hidden = register_module("hidden", torch::nn::Linear(8, 8));
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Linear hidden{nullptr};
};
TORCH_MODULE(Tied);

std::shared_ptr<PipelineStage> tied_stage_of(const World& ranks) {
  return pipeline_stage<Tied>(
      [] { return Tied(); },
      [](Tied& tied) -> PipelineLayers {
        return {{"embedding",
                 {tied->embedding.ptr()},
                 [tied](const torch::Tensor& x) mutable { return tied->embedding(x); }},
                {"hidden",
                 {tied->hidden.ptr()},
                 [tied](const torch::Tensor& x) mutable { return tied->hidden(x); }},
                {"head", {tied->embedding.ptr()}, [tied](const torch::Tensor& x) mutable {
                   return torch::nn::functional::linear(x, tied->embedding->weight);
                 }}};
      },
      ranks, {.first_layers = {0, 1}});
}

const int kTiedApart =
    is_refused(kGroup, "puts the two ends of a tied weight into parameter groups of other numbers",
               "the two stages that have a tied weight", "put it into the same group on both",
               [](auto& run) {
                 const Mesh mesh(run.world(), {{"pipeline", 2}, {"data", 1}});
                 Pipeline::Model model(tied_stage_of(mesh["pipeline"]), mesh, run.options);
                 std::vector<torch::Tensor> tied, others;
                 for (const auto& item : model.named_parameters()) {
                   const bool is_first = run.rank() == 0;
                   (is_first == (item.key().find("embedding") != std::string::npos) ? tied : others)
                       .push_back(item.value());
                 }
                 const Optimizer<SGD> optimizer(
                     model,
                     ShardedOptimizer::Groups{torch::optim::OptimizerParamGroup(tied),
                                              torch::optim::OptimizerParamGroup(others)},
                     SGDOptions(0.1));
               },
               {.stages = {0, 1}});

}  // namespace
}  // namespace zeropage::habits_of_pipelines
