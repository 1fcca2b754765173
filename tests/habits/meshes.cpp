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

}  // namespace
}  // namespace zeropage::habits_of_meshes
