// How scripts read metrics of all ranks, and what each rank owns.
#include <map>

#include <gmock/gmock.h>

#include "tests/habits/scripts.h"
#include "tests/harness/disk_folder.h"

namespace zeropage::habits_of_ranks {
namespace {

using namespace zeropage::testing;
using ::testing::HasSubstr;

constexpr const char* kGroup = "Ranks and shards";

const int kMetrics = add_habit(
    {kGroup, "sums metrics of ranks that saw different numbers of samples", "", [] {
       for (const Setting& setting : settings_over(Over::kFp32)) {
         SCOPED_TRACE(::testing::Message() << setting);
         run_ranks(setting.ranks, [&](World& world) {
           OurRun run(world, setting);
           auto model = run.wrap(make<Mlp>());
           const torch::NoGradGuard no_grad;
           const int64_t seen = 3 + world.rank();
           const Samples samples = samples_of(world.rank(), 0, seen);
           const auto outputs = model(samples.inputs);
           const double loss = loss_against(outputs, samples.targets).item<double>();
           const double mean =
               world.sum(loss * static_cast<double>(seen)) / world.sum(static_cast<double>(seen));
           double expected = 0;
           double all = 0;
           auto plain = make<Mlp>();
           for (int rank = 0; rank < world.size(); ++rank) {
             const Samples of_rank = samples_of(rank, 0, 3 + rank);
             expected += (3 + rank) * loss_against(plain->forward(of_rank.inputs), of_rank.targets)
                                          .template item<double>();
             all += 3 + rank;
           }
           EXPECT_NEAR(mean, expected / all, 1e-6);
         });
       }
     }});

const int kAlone =
    is_refused(kGroup, "sums a metric on rank 0 alone", "World::sum()", "call it on all ranks",
               [](auto& run) {
                 if (run.rank() == 0) run.world().sum(1.0);
               },
               {.stages = {1}});

const int kUnlike =
    is_refused(kGroup, "sums tensors whose sizes differ between ranks",
               "rank 0 has sizes: [1]; rank 1 has", "pad them, or sum numbers",
               [](auto& run) { run.world().sum(torch::ones({1 + run.rank()})); }, {.stages = {1}});

const int kAverages =
    is_right(kGroup, "keeps an average of what each rank owns, and evaluates with it",
             [](auto& run) {
               auto model = run.wrap(make<Mlp>());
               auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
               const auto train = [&](const auto& update) {
                 for (int step = 0; step < 3; ++step) {
                   train_step(run, model, *optimizer, step);
                   update();
                 }
               };
               const torch::Tensor inputs = samples_of(run.rank(), 0).inputs;
               if constexpr (std::decay_t<decltype(run)>::kOurs) {
                 WeightAverage average(model, {.decay = 0.75});
                 train([&] { average.update(); });
                 average.swap_in();
                 Values all = run.values(model);
                 {
                   const torch::NoGradGuard no_grad;
                   all.push_back(model(inputs).clone());
                 }
                 average.swap_out();
                 for (const torch::Tensor& values : run.values(model)) all.push_back(values);
                 return all;
               } else {
                 Values average = run.values(model);
                 train([&] {
                   const Values values = run.values(model);
                   for (size_t i = 0; i < average.size(); ++i)
                     average[i].mul_(0.75).add_(values[i], 0.25);
                 });
                 const torch::NoGradGuard no_grad;
                 const Values trained = run.values(model);
                 const auto swap_in = [&](const Values& values) {
                   const auto parameters = model.parameters();
                   for (size_t i = 0; i < values.size(); ++i)
                     torch::Tensor(parameters[i]).copy_(values[i]);
                 };
                 Values all = average;
                 swap_in(average);
                 all.push_back(model(inputs).clone());
                 swap_in(trained);
                 for (const torch::Tensor& values : trained) all.push_back(values);
                 return all;
               }
             },
             // lerp_ rounds otherwise at the ends of vectors, and shards end elsewhere.
             {.over = Over::kFp32, .tolerance = 1e-6});

// On the host the tier is a disk.
const int kParks =
    is_right(kGroup, "parks the model after each step, and trains on", [](auto& run) {
      const DiskFolder disk;
      auto model = run.wrap(make<Mlp>());
      auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
      for (int step = 0; step < 3; ++step) {
        train_step(run, model, *optimizer, step);
        optimizer->zero_grad();
        if constexpr (std::decay_t<decltype(run)>::kOurs) {
          model.park(Tier::kNvme, disk.path());
          model.resume();
        }
      }
      return everything(run, model);
    });

template <typename Run, typename Use>
void while_parked(Run& run, const Use& use) {
  const DiskFolder disk;
  auto model = run.wrap(make<Mlp>());
  Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
  model.park(Tier::kNvme, disk.path());
  use(model, optimizer);
}

const int kParkedForward =
    is_refused(kGroup, "calls the model while it is parked", "forward(): the model is parked",
               "`model.resume()`", [](auto& run) {
                 while_parked(run, [](auto& model, auto&) { model(samples_of(0, 0).inputs); });
               });
const int kParkedStep = is_refused(
    kGroup, "steps while the model is parked", "step(): the model is parked", "`model.resume()`",
    [](auto& run) { while_parked(run, [](auto&, auto& optimizer) { optimizer.step(); }); });
const int kParkedRead = is_refused(
    kGroup, "reads a parameter while the model is parked", "parked", "`model.resume()`",
    [](auto& run) { while_parked(run, [](auto& model, auto&) { model->first->bias.sum(); }); });
const int kParkedEarly = is_refused(kGroup, "parks the model between backward and step",
                                    "has a gradient, and park() is for the time between two steps",
                                    "`step()` and `zero_grad()`", [](auto& run) {
                                      const DiskFolder disk;
                                      auto model = run.wrap(make<Mlp>());
                                      backward_of_step(run, model, 0);
                                      model.park(Tier::kNvme, disk.path());
                                    });

const int kWrites =
    is_refused(kGroup, "writes to what it has read of a parameter's shard",
               "Inplace update to inference tensor outside InferenceMode is not allowed",
               "assign_owned_shards(), or operators on the parameter", [](auto& run) {
                 auto model = run.wrap(make<Mlp>());
                 owned_shard(model, model->first->weight).values.fill_(0);
               });

const int kReadsAlone =
    add_habit({kGroup, "reads the owned part of a parameter on rank 0 alone", "", [] {
                 for (const Setting& setting : settings_over(Over::kFp32)) {
                   SCOPED_TRACE(::testing::Message() << setting);
                   run_ranks(setting.ranks, [&](World& world) {
                     OurRun run(world, setting);
                     auto model = run.wrap(make<Mlp>());
                     auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
                     train_steps(run, model, *optimizer, 2);
                     if (world.rank() == 0) {
                       const OwnedShard shard = owned_shard(model, model->second->weight);
                       EXPECT_EQ(shard.values.numel(), shard.range.numel());
                     }
                     train_steps(run, model, *optimizer, 2, 2);
                   });
                 }
               }});

const int kTwoSavers =
    add_habit({kGroup, "saves by a StateSaver after another one was made for its folder",
               "one saver a folder, made before load_state()", [] {
                 for (const int stage : {0, 3}) {
                   const Setting setting{.stage = stage};
                   const DiskFolder disk;
                   const auto errors = try_ranks(setting.ranks, [&](World& world) {
                     OurRun run(world, setting);
                     auto model = run.wrap(make<Mlp>());
                     Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
                     StateSaver older(disk.path(), world);
                     const StateSaver newer(disk.path(), world);
                     older.save(model, optimizer, {.step = 1});
                     older.wait();
                   });
                   EXPECT_THAT(message_of(errors[0]), HasSubstr("has lost this folder to run 2"));
                 }
               }});

}  // namespace
}  // namespace zeropage::habits_of_ranks
