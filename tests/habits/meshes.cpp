// How scripts put ranks on a grid, and train along its axes.
#include "tests/habits/scripts.h"

namespace zeropage::habits_of_meshes {
namespace {

using namespace zeropage::testing;

constexpr const char* kGroup = "Ranks on a grid";

const auto kScript = [](auto& run) {
  auto model = run.wrap(make<Mlp>());
  auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
  train_steps(run, model, *optimizer);
  return everything(run, model);
};

const int kAlongAnAxis =
    add_habit({kGroup, "trains a copy of the model along one axis of a mesh", "", [] {
                 constexpr int kPlaces = 2;
                 for (const int stage : {0, 1, 2, 3}) {
                   const Setting setting{.stage = stage, .mode = Mode::kFp32, .ranks = 2};
                   SCOPED_TRACE(::testing::Message() << setting);
                   const auto expected = values_of_ranks(
                       setting, kScript, [&](World& world) { return PlainRun(world, setting); });
                   std::vector<std::vector<Values>> by_tensor(kPlaces, std::vector<Values>(2));
                   run_ranks(2 * kPlaces, [&](World& world) {
                     const Mesh mesh(world, {{"data", 2}, {"tensor", kPlaces}});
                     World data = mesh["data"];
                     OurRun run(data, setting);
                     const auto tensor = static_cast<size_t>(mesh["tensor"].rank());
                     by_tensor[tensor][static_cast<size_t>(data.rank())] = kScript(run);
                   });
                   for (const auto& actual : by_tensor) expect_alike(expected, actual, setting, 0);
                 }
               }});

const int kNoGrid =
    is_refused(kGroup, "makes a mesh whose sizes do not multiply to the number of ranks",
               "need more than 2 ranks, but the world has 2", "make them multiply to it",
               [](auto& run) {
                 Mesh(run.world(), {{"data", 2}, {"tensor", 2}});
               },
               {.stages = {0}});

const int kTwice = is_refused(kGroup, "names two axes of a mesh alike", "\"data\" is there twice",
                              "choose another name",
                              [](auto& run) {
                                Mesh(run.world(), {{"data", 2}, {"data", 1}});
                              },
                              {.stages = {0}});

const int kReserved = is_refused(kGroup, "names an axis \"context\"", "\"context\" is reserved",
                                 "choose another name",
                                 [](auto& run) {
                                   Mesh(run.world(), {{"context", 2}});
                                 },
                                 {.stages = {0}});

const int kNoAxis = is_refused(kGroup, "asks a mesh for an axis that it does not have",
                               "no axis \"pipeline\" among \"data\" 1, \"tensor\" 2",
                               "the message lists those that it has; ask has() first",
                               [](auto& run) {
                                 const Mesh mesh(run.world(), {{"data", 1}, {"tensor", 2}});
                                 static_cast<void>(mesh["pipeline"]);
                               },
                               {.stages = {0}});

const int kUnlike =
    is_refused(kGroup, "makes meshes whose axes differ between ranks",
               "rank 0 has axes: \"data\" 1, ", "give all ranks the same axes",
               [](auto& run) {
                 Mesh(run.world(), {{"data", 1 + run.rank()}, {"tensor", 2 - run.rank()}});
               },
               {.stages = {0}});

const int kAlone =
    is_refused(kGroup, "makes a mesh on rank 0 alone", "the mesh: ", "make it on all ranks",
               [](auto& run) {
                 if (run.rank() == 0) Mesh(run.world(), {{"data", 2}});
               },
               {.stages = {0}});

const int kNoGroups = is_refused(
    kGroup, "shards within groups of more ranks than there are, or that do not divide them",
    "2 ranks do not divide into groups of 4", "choose a divisor of the number of ranks",
    [](auto& run) {
      Options options;
      options.shard_within = 4;
      const DistributedDataParallel<Mlp> model(make<Mlp>(), run.world(), options);
    },
    {.stages = {1}});

const int kNotCut =
    is_refused(kGroup, "wraps a module over a mesh with an axis \"tensor\" without cutting it",
               "no parameter of the module is a slice", "call tensor_parallel() before wrapping",
               [](auto& run) {
                 const Mesh mesh(run.world(), {{"data", 1}, {"tensor", 2}});
                 const DistributedDataParallel<Mlp> model(make<Mlp>(), mesh);
               },
               {.stages = {1}});

const int kSavesAPart = is_refused(
    kGroup, "saves a module that is cut over a mesh, but was wrapped over one axis",
    "each of 2 ranks has slices of parameters", "wrap it over the whole mesh", [](auto& run) {
      const Mesh mesh(run.world(), {{"data", 1}, {"tensor", 2}});
      torch::nn::Sequential net(torch::nn::Linear(4, 4));
      tensor_parallel(net, mesh["tensor"], {{"0", Cut::column()}});
      DistributedDataParallel<torch::nn::Sequential> model(net, mesh["data"]);
      save_weights("nowhere", model);
    });

// ---- what ranks of a tensor-parallel group have alike ----

struct NetImpl : torch::nn::Module {
  NetImpl() {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({7})));
    up = register_module("up", torch::nn::Linear(7, 40));
    between = register_module("between", torch::nn::PReLU());
    down = register_module("down", torch::nn::Linear(40, 7));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor hidden = up(norm(x));
    return down(with_parameter_between ? between(hidden) : torch::relu(hidden));
  }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
  torch::nn::PReLU between{nullptr};
  bool with_parameter_between = false;
};
TORCH_MODULE(Net);

Net cut_net(const Mesh& mesh) {
  Net net = make<Net>();
  tensor_parallel(net, mesh["tensor"], {{"up", Cut::column()}, {"down", Cut::row()}});
  return net;
}

// Two ranks that share slices; change(net): between the cut and the wrapper; step(model, step): before its backward.
template <typename Change, typename Before>
void train_cut(OurRun& run, const Change& change, const Before& before, bool clips,
               bool own_batch = false) {
  const Mesh mesh(run.world(), {{"data", 1}, {"tensor", 2}});
  Net net = cut_net(mesh);
  change(net);
  DistributedDataParallel<Net> model(net, mesh, run.options);
  Optimizer<SGD> optimizer(model, SGDOptions(0.1));
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    before(model, step);
    const Samples samples = samples_of(own_batch ? run.rank() : 0, step);
    loss_against(model(samples.inputs), samples.targets).backward();
    if (clips) clip_grad_norm_(model, 0.5);
    optimizer.step();
  }
}

constexpr auto kNothing = [](auto&&...) {};
const RefusedOptions kFirstAndLast = {.stages = {0, 3}};

const int kOwnBatches = is_refused(
    kGroup, "gives ranks of a tensor-parallel group other batches, and clips",
    "gradients of whole parameters", "give them the same batches",
    [](auto& run) { train_cut(run, kNothing, kNothing, /*clips=*/true, /*own_batch=*/true); },
    kFirstAndLast);

const int kOwnBatchesUnclipped = is_refused(
    kGroup, "gives ranks of a tensor-parallel group other batches, and does not clip",
    "values of parameter \"norm.weight\"", "give them the same batches",
    [](auto& run) { train_cut(run, kNothing, kNothing, /*clips=*/false, /*own_batch=*/true); },
    {.stages = {0}});

const int kBetween = is_refused(
    kGroup, "has a parameter between a column and its row, as it is",
    "gradients of whole parameters", "use it through `parallel::copy_to_ranks()`",
    [](auto& run) {
      train_cut(
          run, [](Net& net) { net->with_parameter_between = true; }, kNothing, /*clips=*/true);
    },
    kFirstAndLast);

const int kWritesByWorldRank = is_refused(
    kGroup, "writes to a whole parameter under a guard on world rank 0 of a tensor-parallel group",
    "parameter \"norm.weight\"", "write on all ranks along \"tensor\"",
    [](auto& run) {
      train_cut(
          run, kNothing,
          [&](auto& model, int step) {
            const torch::NoGradGuard no_grad;
            const GatheredParameters guard(model, Modified::on_rank(0));
            if (step == 1 && run.rank() == 0) model->norm->weight.fill_(0.5);
          },
          /*clips=*/false);
    },
    {.stages = {0}});

const int kInitialises = add_habit(
    {kGroup, "initialises whole layers anew by a seed of each rank, after tensor_parallel()", "",
     [] {
       for (const int stage : {0, 3}) {
         const Setting setting{.stage = stage, .mode = Mode::kFp32, .ranks = 2};
         SCOPED_TRACE(::testing::Message() << setting);
         std::vector<torch::Tensor> weights(2);
         run_ranks(2, [&](World& world) {
           OurRun run(world, setting);
           const Mesh mesh(world, {{"data", 1}, {"tensor", 2}});
           Net net = cut_net(mesh);
           {
             const torch::NoGradGuard no_grad;
             net->norm->weight.fill_(1 + world.rank());
           }
           DistributedDataParallel<Net> model(net, mesh, run.options);
           weights[static_cast<size_t>(world.rank())] = run.values(model).front();
         });
         EXPECT_TRUE(weights[0].equal(torch::ones({7})));
         EXPECT_TRUE(weights[1].equal(torch::ones({7})));
       }
     }});

}  // namespace
}  // namespace zeropage::habits_of_meshes
