// What scripts decide on each rank by itself, and all ranks must have alike.
#include <gmock/gmock.h>

#include "tests/habits/scripts.h"
#include "tests/harness/disk_folder.h"

namespace zeropage::habits_of_agreement {
namespace {

using namespace zeropage::testing;
using ::testing::HasSubstr;

constexpr const char* kGroup = "What ranks must have alike";

// What every rank is told.
struct Told {
  std::vector<std::string> words;
  std::vector<int> stages = {0, 1, 2, 3};
  // Where ranks are in calls that never meet before they compare anything.
  std::vector<int> out_of_step = {};
};

void expect_told(const std::vector<std::exception_ptr>& errors,
                 const std::vector<std::string>& words) {
  for (const std::exception_ptr& error : errors) {
    for (const std::string& of_words : words) {
      EXPECT_THAT(message_of(error), HasSubstr(of_words));
    }
  }
}

template <typename Script>
int is_told(std::string does, Told told, std::string instead, const Script& script) {
  return add_habit({kGroup, std::move(does), std::move(instead), [told, script] {
                      const auto expect = [&](int stage, const std::vector<std::string>& words) {
                        for (const int ranks : {2, 3}) {
                          const Setting setting{.stage = stage, .ranks = ranks};
                          SCOPED_TRACE(::testing::Message() << setting);
                          const auto errors = try_ranks(ranks, [&](World& world) {
                            OurRun run(world, setting);
                            script(run);
                          });
                          expect_told(errors, words);
                        }
                      };
                      for (const int stage : told.stages) expect(stage, told.words);
                      for (const int stage : told.out_of_step) expect(stage, {"out of step"});
                    }});
}

AdamWOptions& options_of(torch::optim::Optimizer& optimizer) {
  return static_cast<AdamWOptions&>(optimizer.param_groups()[0].options());
}

bool is_last(const auto& run) {
  return run.rank() == run.ranks() - 1;
}

const int kOwnRate =
    is_told("feeds each rank's own loss to a scheduler of the learning rate",
            {{"lr of parameter group 0", "rank 0 has 0.1, rank ", " has 0.05", "world.mean(loss)"}},
            "give it `world.mean(loss)`", [](auto& run) {
              auto model = run.wrap(make<Mlp>());
              auto optimizer = run.template optimizer<SGD>(model, SGDOptions(0.1));
              train_steps(run, model, *optimizer, 2);
              if (is_last(run)) optimizer->param_groups()[0].options().set_lr(0.05);
              train_steps(run, model, *optimizer, 1, 2);
            });

const int kOwnDecay =
    is_told("sets options between backward and step(), other ones on one rank",
            {{"weight_decay of parameter group 0", "rank 0 has 0.01, rank ", " has 0.5"}},
            "set options on all ranks alike", [](auto& run) {
              auto model = run.wrap(make<Mlp>());
              auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
              train_steps(run, model, *optimizer, 2);
              optimizer->zero_grad();
              backward_of_step(run, model, 2);
              options_of(*optimizer).lr(0.02);
              if (is_last(run)) options_of(*optimizer).weight_decay(0.5);
              optimizer->step();
            });

const int kAloneBetween = is_told("sets an option on one rank alone, between backward and step()",
                                  {{"what changed between backward() and step(): options"}},
                                  "set options on all ranks alike", [](auto& run) {
                                    auto model = run.wrap(make<Mlp>());
                                    auto optimizer =
                                        run.template optimizer<SGD>(model, SGDOptions(0.1));
                                    backward_of_step(run, model, 0);
                                    if (is_last(run))
                                      optimizer->param_groups()[0].options().set_lr(0.05);
                                    optimizer->step();
                                    backward_of_step(run, model, 1);
                                  });

const int kOwnRateAccumulated =
    is_told("sets an option on one rank between an accumulator's last backward and its step",
            {{"lr of parameter group 0", "rank 0 has 0.1, rank "}},
            "set options on all ranks alike", [](auto& run) {
              auto model = run.wrap(make<Mlp>());
              Optimizer<SGD> optimizer(model, SGDOptions(0.1));
              Accumulator accumulator(model, {.micro_steps = 2});
              accumulator.backward(loss_of_step(run, model, 0));
              accumulator.backward(loss_of_step(run, model, 1));
              if (is_last(run)) optimizer.param_groups()[0].options().set_lr(0.05);
              accumulator.step(optimizer);
            });

const int kOwnSecondOptimizer =
    is_told("sets an option of the second of two optimizers on one rank",
            {{"momentum of parameter group 0 of optimizer 1"}}, "set options on all ranks alike",
            [](auto& run) {
              auto model = run.wrap(make<Mlp>());
              auto first = run.template optimizer_of<AdamW>(model, model->first->parameters(),
                                                            AdamWOptions(0.01));
              auto second =
                  run.template optimizer_of<SGD>(model, model->last->parameters(), SGDOptions(0.1));
              for (int step = 0; step < 2; ++step) {
                model.zero_grad();
                backward_of_step(run, model, step);
                first->step();
                second->step();
                if (is_last(run)) {
                  static_cast<SGDOptions&>(second->param_groups()[0].options()).momentum(0.9);
                }
              }
            });

const int kOwnRateBare = is_told("sets an option on one rank, with an optimizer that wraps nothing",
                                 {{"lr of parameter group 0", "rank 0 has 0.1, rank "}, {0, 1}},
                                 "set options on all ranks alike", [](auto& run) {
                                   Mlp module = make<Mlp>();
                                   Optimizer<SGD> optimizer(module->parameters(), run.world(),
                                                            SGDOptions(0.1), run.options);
                                   loss_of_step(run, module, 0).backward();
                                   if (is_last(run))
                                     optimizer.param_groups()[0].options().set_lr(0.05);
                                   optimizer.step();
                                 });

const int kLeavesOut = is_told(
    "leaves out a step() on the rank that saw a spike",
    {.words = {"steps of optimizer 0", "rank 0 has 2, rank ", " has 1", "on all ranks or on none"},
     .stages = {0},
     .out_of_step = {1, 2, 3}},
    "decide by `world.max()` of what each rank saw", [](auto& run) {
      auto model = run.wrap(make<Mlp>());
      auto optimizer = run.template optimizer<SGD>(model, SGDOptions(0.1));
      for (int step = 0; step < 3; ++step) {
        optimizer->zero_grad();
        backward_of_step(run, model, step);
        if (step != 1 || !is_last(run)) optimizer->step();
      }
    });

const int kLeavesOutLast =
    is_told("leaves out the last step() on one rank, and saves",
            {{"steps of optimizer 0", "rank 0 has 2, rank ", " has 1"}, {0, 3}},
            "decide by `world.max()` of what each rank saw", [](auto& run) {
              const DiskFolder folder;
              auto model = run.wrap(make<Mlp>());
              auto optimizer = run.template optimizer<SGD>(model, SGDOptions(0.1));
              train_step(run, model, *optimizer, 0);
              optimizer->zero_grad();
              backward_of_step(run, model, 1);
              if (!is_last(run)) optimizer->step();
              save_weights(std::filesystem::path(folder.path()) / "weights", model);
            });

const int kSetsAndSaves =
    is_told("sets an option on one rank after the last step, and saves the state",
            {{"lr of parameter group 0", "rank 0 has 0.1, rank "}},
            "set options on all ranks alike", [](auto& run) {
              const DiskFolder folder;
              auto model = run.wrap(make<Mlp>());
              Optimizer<SGD> optimizer(model, SGDOptions(0.1));
              train_step(run, model, optimizer, 0);
              if (is_last(run)) optimizer.param_groups()[0].options().set_lr(0.05);
              save_state(std::filesystem::path(folder.path()) / "state", model, optimizer);
            });

}  // namespace
}  // namespace zeropage::habits_of_agreement
