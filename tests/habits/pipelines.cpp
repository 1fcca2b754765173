// How scripts cut a model by its layers over ranks.
#include "tests/habits/scripts.h"
#include "zeropage/checkpoint.h"
#include "zeropage/experts.h"
#include "zeropage/pipeline.h"

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

// ---- scripts that are right over stages ----

using Named = std::map<std::string, torch::Tensor>;

// What a script does beside its steps. A rank of a pipeline has the parameters of its own stages.
struct StageScript {
  std::vector<int64_t> first_layers = {0, 1};
  int chunks = 1;
  parallel::ScheduleKind schedule = parallel::ScheduleKind::kOneForwardOneBackward;
  std::function<void(int step, const Named& parameters)> before_step = {};
  std::function<void(int step, const Named& parameters)> after_backward = {};
};

constexpr int kSteps = 4;

torch::Tensor loss_of_output(const torch::Tensor& output, int64_t micro_batch) {
  return (output - 0.1 * static_cast<double>(micro_batch)).square().mean();
}

template <typename Parameters>
Named by_name(const Parameters& parameters) {
  Named named;
  for (const auto& item : parameters) named[item.key()] = item.value();
  return named;
}

template <typename M>
std::vector<torch::Tensor> inputs_for(int step) {
  std::vector<torch::Tensor> inputs;
  for (int64_t micro_batch = 0; micro_batch < kMicroBatches; ++micro_batch) {
    inputs.push_back(M::ContainedType::input(step * kMicroBatches + micro_batch));
  }
  return inputs;
}

template <typename M>
using LayersOf = std::function<PipelineLayers(M&)>;

torch::Tensor run_all(const PipelineLayers& layers, torch::Tensor x) {
  for (const PipelineLayer& layer : layers) x = layer.forward(x);
  return x;
}

// By LibTorch alone, on one rank.
template <typename M>
Named trained_whole(const LayersOf<M>& layers_of, const StageScript& script) {
  M module;
  const PipelineLayers layers = layers_of(module);
  const Named parameters = by_name(module->named_parameters());
  SGD optimizer(distinct(module->parameters()), SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < kSteps; ++step) {
    if (script.before_step) script.before_step(step, parameters);
    optimizer.zero_grad();
    const auto inputs = inputs_for<M>(step);
    for (int64_t micro_batch = 0; micro_batch < kMicroBatches; ++micro_batch) {
      const torch::Tensor output = run_all(layers, inputs[static_cast<size_t>(micro_batch)]);
      (loss_of_output(output, micro_batch) / kMicroBatches).backward();
    }
    if (script.after_backward) script.after_backward(step, parameters);
    optimizer.step();
  }
  return parameters;
}

// A rank of two stages.
template <typename M>
struct StageRun {
  StageRun(World& world, int stage, const LayersOf<M>& layers_of, const StageScript& script)
      : run(world, {.stage = stage}),
        mesh(world, {{"pipeline", 2}, {"data", 1}}),
        model(pipeline_stage<M>([] { return M(); }, layers_of, mesh["pipeline"],
                                {.chunks = script.chunks, .first_layers = script.first_layers}),
              mesh, run.options),
        optimizer(model, SGDOptions(0.1).momentum(0.9)),
        pipeline(model,
                 {.schedule = script.schedule, .accumulator = {.micro_steps = kMicroBatches}}) {}

  void train(const StageScript& script) {
    const Named parameters = by_name(model.named_parameters());
    for (int step = 0; step < kSteps; ++step) {
      if (script.before_step) script.before_step(step, parameters);
      pipeline.run(inputs_for<M>(step), &loss_of_output);
      if (script.after_backward) script.after_backward(step, parameters);
      pipeline.accumulator().step(optimizer);
    }
  }
  void expect_parameters(const Named& expected) {
    const torch::NoGradGuard no_grad;
    const GatheredParameters guard(model);
    for (const auto& item : model.named_parameters()) {
      ASSERT_TRUE(expected.contains(item.key())) << item.key();
      EXPECT_TRUE(torch::allclose(item.value(), expected.at(item.key()), 1e-5, 1e-6)) << item.key();
    }
  }

  OurRun run;
  const Mesh mesh;
  Pipeline::Model model;
  Optimizer<SGD> optimizer;
  Pipeline pipeline;
};

template <typename M>
int is_right_over_stages(std::string does, const LayersOf<M>& layers_of,
                         const StageScript& script = {}) {
  return add_habit({kGroup, std::move(does), "", [layers_of, script] {
                      const Named expected = trained_whole<M>(layers_of, script);
                      for (const int stage : {0, 3}) {
                        SCOPED_TRACE(::testing::Message() << "stage " << stage);
                        run_ranks(2, [&](World& world) {
                          StageRun<M> run(world, stage, layers_of, script);
                          run.train(script);
                          run.expect_parameters(expected);
                        });
                      }
                    }});
}

// Its layers ask the model whether it trains.
struct MaskedImpl : torch::nn::Module {
  MaskedImpl() {
    torch::manual_seed(5);
    first = register_module("first", torch::nn::Linear(7, 20));
    last = register_module("last", torch::nn::Linear(20, 7));
  }
  static torch::Tensor input(int64_t sample) {
    return torch::linspace(-1, 1, 21).view({3, 7}) * (1 + static_cast<double>(sample) / 8);
  }
  torch::Tensor hidden(const torch::Tensor& x) {
    return torch::dropout(torch::tanh(first(x)), 0.5, is_training());
  }
  torch::Tensor out(const torch::Tensor& x) { return torch::dropout(last(x), 0.5, is_training()); }
  torch::nn::Linear first{nullptr}, last{nullptr};
};
TORCH_MODULE(Masked);

PipelineLayers layers_of_masked(Masked& masked) {
  return {{"hidden",
           {masked->first.ptr()},
           [masked](const torch::Tensor& x) mutable { return masked->hidden(x); }},
          {"out", {masked->last.ptr()}, [masked](const torch::Tensor& x) mutable {
             return masked->out(x);
           }}};
}

const int kEvaluates = add_habit(
    {kGroup, "evaluates, after eval(), layers that ask their model whether it trains", "", [] {
       Masked whole;
       whole->eval();
       const torch::Tensor input = MaskedImpl::input(0);
       const torch::Tensor expected = run_all(layers_of_masked(whole), input);
       run_ranks(2, [&](World& world) {
         StageRun<Masked> run(world, 0, &layers_of_masked, {});
         const auto outputs_differ = [&] {
           bool differ = false;
           run.pipeline.evaluate({input}, 1, [&](const torch::Tensor& output, int64_t) {
             differ = !torch::allclose(output, expected);
           });
           return world.max(differ ? 1.0 : 0.0) > 0;
         };
         EXPECT_TRUE(outputs_differ());
         run.model.eval();
         EXPECT_FALSE(outputs_differ());
         EXPECT_FALSE(run.model.is_training());
         run.model.train();
         EXPECT_TRUE(outputs_differ());
       });
     }});

struct PlainImpl : torch::nn::Module {
  PlainImpl() {
    torch::manual_seed(5);
    first = register_module("first", torch::nn::Linear(7, 20));
    second = register_module("second", torch::nn::Linear(20, 20));
    last = register_module("last", torch::nn::Linear(20, 7));
  }
  static torch::Tensor input(int64_t sample) { return MaskedImpl::input(sample); }
  torch::nn::Linear first{nullptr}, second{nullptr}, last{nullptr};
};
TORCH_MODULE(Plain);

PipelineLayers layers_of_plain(Plain& plain) {
  return {{"first",
           {plain->first.ptr()},
           [plain](const torch::Tensor& x) mutable { return torch::tanh(plain->first(x)); }},
          {"second",
           {plain->second.ptr()},
           [plain](const torch::Tensor& x) mutable { return torch::tanh(plain->second(x)); }},
          {"last", {plain->last.ptr()}, [plain](const torch::Tensor& x) mutable {
             return plain->last(x);
           }}};
}

std::vector<torch::Tensor> values_of(const Named& parameters) {
  std::vector<torch::Tensor> values;
  for (const auto& [unused, value] : parameters) values.push_back(value);
  return values;
}

const int kClips = is_refused(
    kGroup, "clips by torch::nn::utils::clip_grad_norm_ between run() and step()",
    "have been multiplied by", "set AccumulatorOptions::clip_norm", [](auto& run) {
      const StageScript script{.after_backward = [](int, const Named& parameters) {
        torch::nn::utils::clip_grad_norm_(values_of(parameters), 1e-3);
      }};
      StageRun<Plain>(run.world(), run.setting().stage, &layers_of_plain, script).train(script);
    });

const int kClipsOne = is_refused(
    kGroup,
    "clips by clip_grad_norm_ of LibTorch a pipeline of which one stage alone is above the bound",
    "have been multiplied by", "set AccumulatorOptions::clip_norm",
    [](auto& run) {
      const StageScript script{.after_backward = [&](int, const Named& parameters) {
        const double norm =
            torch::nn::utils::clip_grad_norm_(values_of(parameters), /*max_norm=*/1e9);
        const double most = 0.7 * run.world().max(norm) + 0.3 * run.world().min(norm);
        torch::nn::utils::clip_grad_norm_(values_of(parameters), most);
      }};
      StageRun<Plain>(run.world(), run.setting().stage, &layers_of_plain, script).train(script);
    },
    {.stages = {0, 3}});

const int kHalves =
    is_right_over_stages<Plain>("halves all gradients between run() and step()", &layers_of_plain,
                                {.after_backward = [](int, const Named& parameters) {
                                  for (torch::Tensor value : values_of(parameters))
                                    value.mutable_grad().mul_(0.5);
                                }});

const int kClipsAfterANorm = is_refused(
    kGroup,
    "reads zeropage::gradient_norm() of a pipeline, and clips by clip_grad_norm_ of LibTorch",
    "have been multiplied by", "set AccumulatorOptions::clip_norm",
    [](auto& run) {
      StageRun<Plain> of_stage(run.world(), run.setting().stage, &layers_of_plain, {});
      of_stage.train({.after_backward = [&](int, const Named& parameters) {
        EXPECT_GT(gradient_norm(of_stage.model).total, 1e-3);
        torch::nn::utils::clip_grad_norm_(values_of(parameters), 1e-3);
      }});
    },
    {.stages = {0, 3}});

// Whatever norms the stages have.
const int kScalesOneStage = is_right_over_stages<Plain>(
    "multiplies the gradients of one stage alone by 0.9 between run() and step()", &layers_of_plain,
    {.after_backward = [](int step, const Named& parameters) {
      for (const auto& [name, value] : parameters) {
        if (name.starts_with("first") == (step % 2 == 0)) value.mutable_grad().mul_(0.9);
      }
    }});

const int kZeroes = is_right_over_stages<Plain>(
    "scales and zeroes the gradients of some parameters between run() and step()", &layers_of_plain,
    {.after_backward = [](int, const Named& parameters) {
      for (const auto& [name, value] : parameters) {
        torch::Tensor gradient = value.grad();
        if (name == "first.bias") gradient.zero_();
        if (name.starts_with("second")) gradient.mul_(0.1);
      }
    }});

const int kDecaysAndBounds = is_right_over_stages<Plain>(
    "adds to all gradients and bounds them between run() and step()", &layers_of_plain,
    {.after_backward = [](int, const Named& parameters) {
      const torch::NoGradGuard no_grad;
      for (torch::Tensor value : values_of(parameters)) value.mutable_grad().add_(0.01);
      torch::nn::utils::clip_grad_value_(values_of(parameters), 0.02);
    }});

const int kFrozenFirst =
    is_right_over_stages<Plain>("trains with a frozen first stage", &layers_of_plain,
                                {.before_step = [](int step, const Named& parameters) {
                                  for (auto [name, value] : parameters) {
                                    if (step == 0 && name.starts_with("first"))
                                      value.requires_grad_(false);
                                  }
                                }});

const int kFreezesFirst = is_right_over_stages<Plain>(
    "freezes the first stage in the middle of a run, and unfreezes it, under zero-bubble",
    &layers_of_plain,
    {.schedule = parallel::ScheduleKind::kZeroBubble,
     .before_step = [](int step, const Named& parameters) {
       for (auto [name, value] : parameters) {
         if (name.starts_with("first")) value.requires_grad_(step != 1 && step != 2);
       }
     }});

const auto kTokens = [](int64_t sample) {
  return torch::arange(6).add(sample).remainder(11).view({2, 3});
};

struct TiedEndsImpl : torch::nn::Module {
  TiedEndsImpl() {
    torch::manual_seed(5);
    embedding = register_module("embedding", torch::nn::Embedding(11, 8));
    hidden = register_module("hidden", torch::nn::Linear(8, 8));
  }
  static torch::Tensor input(int64_t sample) { return kTokens(sample); }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Linear hidden{nullptr};
};
TORCH_MODULE(TiedEnds);

PipelineLayers layers_of_tied(TiedEnds& tied) {
  return {{"embedding",
           {tied->embedding.ptr()},
           [tied](const torch::Tensor& x) mutable { return tied->embedding(x); }},
          {"hidden",
           {tied->hidden.ptr()},
           [tied](const torch::Tensor& x) mutable { return torch::tanh(tied->hidden(x)); }},
          {"head", {tied->embedding.ptr()}, [tied](const torch::Tensor& x) mutable {
             return torch::nn::functional::linear(x, tied->embedding->weight);
           }}};
}

const int kClipsTied = is_refused(
    kGroup, "clips by clip_grad_norm_ of LibTorch a pipeline with a tied weight",
    "have been multiplied by", "set AccumulatorOptions::clip_norm",
    [](auto& run) {
      const StageScript script{.after_backward = [](int, const Named& parameters) {
        torch::nn::utils::clip_grad_norm_(values_of(parameters), 1e-3);
      }};
      StageRun<TiedEnds>(run.world(), run.setting().stage, &layers_of_tied, script).train(script);
    },
    {.stages = {0, 3}});

const int kScalesBesideTied = is_right_over_stages<TiedEnds>(
    "multiplies the gradients of one layer by 0.9 in a pipeline with a tied weight",
    &layers_of_tied, {.after_backward = [](int, const Named& parameters) {
      for (const auto& [name, value] : parameters) {
        if (name.starts_with("hidden")) value.mutable_grad().mul_(0.9);
      }
    }});

const int kFreezesTied = is_right_over_stages<TiedEnds>(
    "freezes a tied weight of both ends in the middle of a run, and unfreezes it", &layers_of_tied,
    {.before_step = [](int step, const Named& parameters) {
      for (auto [name, value] : parameters) {
        if (name.starts_with("embedding")) value.requires_grad_(step != 1 && step != 2);
      }
    }});

const int kUnfreezesTied = is_right_over_stages<TiedEnds>(
    "wraps a tied weight of both ends while it is frozen, and unfreezes it later",
    [](TiedEnds& tied) {
      tied->embedding->weight.requires_grad_(false);
      return layers_of_tied(tied);
    },
    {.before_step = [](int step, const Named& parameters) {
      for (auto [name, value] : parameters) {
        if (step == 2) value.requires_grad_(true);
      }
    }});

struct NormedImpl : torch::nn::Module {
  NormedImpl() {
    torch::manual_seed(5);
    first = register_module("first", torch::nn::Linear(7, 8));
    norm = register_module("norm", torch::nn::GroupNorm(2, 8));
    last = register_module("last", torch::nn::Linear(8, 7));
  }
  static torch::Tensor input(int64_t sample) { return MaskedImpl::input(sample); }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::GroupNorm norm{nullptr};
};
TORCH_MODULE(Normed);

const int kGroupNorm = is_right_over_stages<Normed>(
    "trains a GroupNorm under zero-bubble",
    [](Normed& normed) -> PipelineLayers {
      return {{"first",
               {normed->first.ptr()},
               [normed](const torch::Tensor& x) mutable { return normed->first(x); }},
              {"norm",
               {normed->norm.ptr(), normed->last.ptr()},
               [normed](const torch::Tensor& x) mutable { return normed->last(normed->norm(x)); }}};
    },
    {.schedule = parallel::ScheduleKind::kZeroBubble});

// A vision transformer, say: the model itself has a class token and a table of places, and all layers turn by one table.
struct TokenedImpl : torch::nn::Module {
  TokenedImpl() {
    torch::manual_seed(5);
    token = register_parameter("token", torch::randn({1, 1, 8}));
    places = register_parameter("places", torch::randn({4, 8}));
    turns = register_buffer("turns", torch::linspace(-1, 1, 8));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int block = 0; block < 3; ++block) blocks->push_back(torch::nn::Linear(8, 8));
    scale = register_parameter("scale", torch::ones({8}));
  }
  static torch::Tensor input(int64_t sample) {
    return torch::linspace(-1, 1, 48).view({2, 3, 8}) * (1 + static_cast<double>(sample) / 8);
  }
  torch::Tensor embed(const torch::Tensor& x) {
    return torch::cat({token.expand({x.size(0), 1, 8}), x}, 1) + places;
  }
  torch::Tensor token, places, turns, scale;
  torch::nn::ModuleList blocks{nullptr};
};
TORCH_MODULE(Tokened);

PipelineLayers layers_of_tokened(Tokened& tokened) {
  PipelineLayers layers = layers_of(
      tokened->blocks, [tokened](torch::nn::Module& block, const torch::Tensor& x) mutable {
        return x + torch::tanh(block.as<torch::nn::Linear>()->forward(x)) * tokened->turns;
      });
  for (PipelineLayer& layer : layers) layer.tensors = {tokened->turns};
  layers.insert(layers.begin(),
                {"embed",
                 {},
                 [tokened](const torch::Tensor& x) mutable { return tokened->embed(x); },
                 {tokened->token, tokened->places}});
  layers.push_back({"scale",
                    {},
                    [tokened](const torch::Tensor& x) mutable { return x * tokened->scale; },
                    {tokened->scale}});
  return layers;
}

const int kOwnParameters = is_right_over_stages<Tokened>(
    "lists parameters of the model itself, and a buffer that layers of all ranks read",
    &layers_of_tokened, {.first_layers = {0, 2}});

const int kFrozenChunk = is_right_over_stages<Tokened>(
    "freezes the first of several chunks of a rank", &layers_of_tokened,
    {.first_layers = {0, 1, 2, 3},
     .chunks = 2,
     .schedule = parallel::ScheduleKind::kInterleaved,
     .before_step = [](int step, const Named& parameters) {
       for (auto [name, value] : parameters) {
         if (name == "token" || name == "places") value.requires_grad_(step != 1 && step != 2);
       }
     }});

void make_tokened_stage(World& world,
                        const std::function<void(PipelineLayers&, Tokened&)>& change) {
  const Mesh mesh(world, {{"pipeline", 2}, {"data", 1}});
  Pipeline::Model model(pipeline_stage<Tokened>([] { return Tokened(); },
                                                [&](Tokened& tokened) {
                                                  PipelineLayers layers =
                                                      layers_of_tokened(tokened);
                                                  change(layers, tokened);
                                                  return layers;
                                                },
                                                mesh["pipeline"], {.first_layers = {0, 2}}),
                        mesh);
  Pipeline pipeline(model, {.accumulator = {.micro_steps = kMicroBatches}});
  pipeline.run(inputs_for<Tokened>(0), &loss_of_output);
}

const int kHoldsOthers = is_refused(
    kGroup, "lists the whole model in a layer that uses a parameter of the model itself",
    "lists the model itself, which holds module \"blocks.1\"",
    "list the parameter in PipelineLayer::tensors",
    [](auto& run) {
      make_tokened_stage(run.world(), [](PipelineLayers& layers, Tokened& tokened) {
        layers.front().tensors.clear();
        layers.front().modules = {tokened.ptr()};
      });
    },
    kOnce);

const int kNotOfModel = is_refused(
    kGroup, "uses a module in a layer that the model does not register",
    "is no parameter or buffer", "register it in the model",
    [](auto& run) {
      make_tokened_stage(run.world(), [](PipelineLayers& layers, Tokened&) {
        layers.front().modules = {torch::nn::Linear(8, 8).ptr()};
      });
    },
    kOnce);

const int kWritesShared = is_refused(
    kGroup, "writes a buffer that layers of several ranks use", "was written to by a layer",
    "give each layer a buffer of its own",
    [](auto& run) {
      make_tokened_stage(run.world(), [](PipelineLayers& layers, Tokened& tokened) {
        layers[1].forward = [tokened](const torch::Tensor& x) mutable {
          const torch::NoGradGuard no_grad;
          tokened->turns.mul_(0.5);
          return x;
        };
      });
    },
    kOnce);

struct MixedImpl : torch::nn::Module {
  MixedImpl() {
    parallel::ExpertsOptions options(/*d_model=*/8, /*d_hidden=*/8, /*experts=*/2, /*active=*/1);
    options.balance_bias_rate = 0.1;
    experts = register_module("experts", parallel::Experts(options));
  }
  parallel::Experts experts{nullptr};
};
TORCH_MODULE(Mixed);

const int kBalancesShared = is_refused(
    kGroup, "uses Experts with a bias for balance in layers of two ranks",
    "\"experts\" have a balance_bias and are used by layers on 2 ranks, 0 to 1",
    "give each layer Experts of its own",
    [](auto& run) {
      const Mesh mesh(run.world(), {{"pipeline", 2}, {"data", 1}});
      pipeline_stage<Mixed>([] { return Mixed(); },
                            [](Mixed& mixed) {
                              const auto forward = [mixed](const torch::Tensor& x) mutable {
                                return mixed->experts->forward(x);
                              };
                              const auto module = mixed->experts.ptr();
                              return PipelineLayers{{"below", {module}, forward, {}},
                                                    {"above", {module}, forward, {}}};
                            },
                            mesh["pipeline"]);
    },
    kOnce);

const int kScalesStage = is_right_over_stages<Plain>(
    "scales the gradients of all parameters of one stage between run() and step()",
    &layers_of_plain, {.after_backward = [](int, const Named& parameters) {
      for (const auto& [name, value] : parameters) {
        if (name.starts_with("first")) value.grad().mul_(0.1);
      }
    }});

const int kGoesOn = add_habit(
    {kGroup, "catches an error that one rank meets in the middle of a run, and goes on", "", [] {
       const Named expected = trained_whole<Plain>(&layers_of_plain, {});
       for (const int stage : {0, 3}) {
         SCOPED_TRACE(::testing::Message() << "stage " << stage);
         run_ranks(2, [&](World& world) {
           StageRun<Plain> run(world, stage, &layers_of_plain, {});
           int failures = 0;
           for (int step = 0; step < kSteps; ++step) {
             bool fails = step == 2;
             for (bool is_done = false; !is_done;) {
               try {
                 run.pipeline.run(inputs_for<Plain>(step),
                                  [&](const torch::Tensor& output, int64_t micro_batch) {
                                    ZP_CHECK(!fails || micro_batch != 1, "no target");
                                    return loss_of_output(output, micro_batch);
                                  });
                 is_done = true;
               } catch (const c10::Error& error) {
                 fails = false;
                 ++failures;
                 EXPECT_NE(message_of(error).find("no target"), std::string::npos)
                     << message_of(error);
               }
             }
             run.pipeline.accumulator().step(run.optimizer);
           }
           EXPECT_EQ(failures, 1);
           run.expect_parameters(expected);
         });
       }
     }});

}  // namespace
}  // namespace zeropage::habits_of_pipelines
