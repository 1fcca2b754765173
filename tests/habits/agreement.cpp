// What scripts decide on each rank by itself, and all ranks must have alike.
#include <cstring>

#include <ATen/CPUGeneratorImpl.h>
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
                                   train_steps(run, module, optimizer, 1);
                                   if (is_last(run))
                                     optimizer.param_groups()[0].options().set_lr(0.05);
                                   train_steps(run, module, optimizer, 1, 1);
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

// ---- values ----

template <typename Model>
void add_noise(Model& model, uint64_t seed) {
  const torch::NoGradGuard no_grad;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  for (torch::Tensor parameter : model.parameters()) {
    parameter.add_(torch::randn(parameter.sizes(), generator), 0.01);
  }
}

// Trains two steps, changes something, trains on.
template <typename Run, typename Change>
Values trained_around(Run& run, const Change& change, int steps = 2) {
  auto model = run.wrap(make<Mlp>());
  auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
  train_steps(run, model, *optimizer, 2);
  change(model);
  train_steps(run, model, *optimizer, steps, 2);
  return run.values(model);
}

const int kOwnNoise = is_told(
    "adds noise to parameters, by a seed of each rank",
    {{"parameter \"first.bias\": rank 0 has ", "with random numbers of one seed"}},
    "give all ranks one seed", [](auto& run) {
      trained_around(run,
                     [&](auto& model) { add_noise(model, 7 + static_cast<uint64_t>(run.rank())); });
    });

const int kOwnNoiseBetween = is_told("adds noise of each rank's own between backward and step()",
                                     {{"step()", "parameter \"first.bias\": rank 0 has "}},
                                     "give all ranks one seed", [](auto& run) {
                                       auto model = run.wrap(make<Mlp>());
                                       auto optimizer =
                                           run.template optimizer<SGD>(model, SGDOptions(0.1));
                                       backward_of_step(run, model, 0);
                                       add_noise(model, 7 + static_cast<uint64_t>(run.rank()));
                                       optimizer->step();
                                     });

const int kOneNoise = is_right(
    kGroup, "adds noise to parameters, by one seed on all ranks",
    [](auto& run) { return trained_around(run, [](auto& model) { add_noise(model, 7); }); },
    {.over = Over::kFp32});

const int kWritesAlone = is_told(
    "copies pretrained values in on rank 0, without a guard",
    {.words = {"values of parameter \"last.weight\": rank 0 has norm ", "Modified::on_rank(0)"},
     .stages = {0, 1, 2},
     .out_of_step = {3}},
    "write under `GatheredParameters(model, Modified::on_rank(0))`", [](auto& run) {
      trained_around(run, [&](auto& model) {
        const torch::NoGradGuard no_grad;
        if (run.rank() == 0) model->last->weight.fill_(0.125);
      });
    });

const int kWritesAnElement =
    is_told("writes to one element of a parameter on one rank",
            {.words = {"values of parameter \"second.weight\": rank 0 has norm "},
             .stages = {0, 1, 2},
             .out_of_step = {3}},
            "write on all ranks alike", [](auto& run) {
              trained_around(run, [&](auto& model) {
                const torch::NoGradGuard no_grad;
                if (is_last(run)) model->second->weight.select(0, 1).narrow(0, 2, 1).zero_();
              });
            });

const int kPrunesAlone =
    is_told("prunes parameters through .data() on one rank",
            {.words = {"values of parameter \"second.weight\": rank 0 has norm "},
             .stages = {0, 1, 2},
             .out_of_step = {3}},
            "write on all ranks alike", [](auto& run) {
              trained_around(run, [&](auto& model) {
                if (is_last(run))
                  model->second->weight.data().mul_(model->second->weight.data().gt(0));
              });
            });

const int kRawAlone =
    is_told("writes to memory itself on one rank, at stages 0 to 2",
            {{"values of parameter \"second.bias\": rank 0 has norm "}, {0, 1, 2}},
            "write under `GatheredParameters` with `Modified`", [](auto& run) {
              trained_around(run, [&](auto& model) {
                if (is_last(run))
                  std::memset(model->second->bias.data_ptr(), 0, 40 * sizeof(float));
              });
            });

// So large that a backward looks at a part of each tensor.
struct WideImpl : torch::nn::Module {
  WideImpl() {
    first = register_module("first", torch::nn::Linear(7, 512));
    last = register_module("last", torch::nn::Linear(512, 7));
    table = register_buffer("table", torch::ones({64, 512}));
  }
  torch::Tensor forward(const torch::Tensor& x) { return last(torch::tanh(first(x)) * table[0]); }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::Tensor table;
};
TORCH_MODULE(Wide);

// One on this rank alone.
template <typename Run, typename Tensor>
void train_with_an_odd_element(Run& run, const Tensor& tensor_of) {
  auto model = run.wrap(make<Wide>());
  auto optimizer = run.template optimizer<SGD>(model, SGDOptions(0.1));
  train_steps(run, model, *optimizer, 2);
  if (is_last(run)) tensor_of(model).template data_ptr<float>()[640] = 2;
  train_steps(run, model, *optimizer, 1, 2);
}

const int kRawElement = is_told(
    "writes to one element of a large parameter past LibTorch's operators, on one rank, at "
    "stages 0 to 2",
    {{"after 2 steps. values of parameter \"first.weight\": rank 0 has norm "}, {0, 1, 2}},
    "write on all ranks alike; it is noticed within `Options::compare_replicas` steps",
    [](auto& run) {
      run.options.compare_replicas = 1;
      train_with_an_odd_element(run, [](auto& model) { return model->first->weight; });
    });

const int kOwnTable =
    is_told("writes to a buffer past LibTorch's operators on one rank, without broadcast_buffers",
            {{"after 2 steps. values of buffer \"table\": rank 0 has norm "}},
            "write it by operators, or on all ranks alike", [](auto& run) {
              run.options.broadcast_buffers = false;
              train_with_an_odd_element(run, [](auto& model) { return model->table; });
            });

const int kOwnValuesUnderGuard =
    is_told("writes other values on each rank, under Modified::on_every_rank()",
            {{"parameter \"first.weight\": rank 0 has "}},
            "write the same, or use `Modified::on_rank(0)`", [](auto& run) {
              trained_around(run, [&](auto& model) {
                const torch::NoGradGuard no_grad;
                const auto guard = run.gathered(model, Modified::on_every_rank());
                model->first->weight.fill_(0.01 * (1 + run.rank()));
              });
            });

const int kWritesAndSaves =
    is_told("writes to a parameter on one rank after the last step, and saves",
            {{"saving state", "values of parameter \"last.bias\": rank 0 has norm "}, {0, 1, 2}},
            "write on all ranks alike", [](auto& run) {
              const DiskFolder folder;
              auto model = run.wrap(make<Mlp>());
              auto optimizer = run.template optimizer<SGD>(model, SGDOptions(0.1));
              train_step(run, model, *optimizer, 0);
              {
                const torch::NoGradGuard no_grad;
                if (run.rank() == 0) model->last->bias.zero_();
              }
              save_weights(std::filesystem::path(folder.path()) / "weights", model);
            });

const int kForeignRate = is_told(
    "steps a torch::optim class with another learning rate on one rank",
    {{"parameter \"first.bias\": rank 0 has "}}, "set options on all ranks alike", [](auto& run) {
      auto model = run.wrap(make<Mlp>());
      SGD optimizer(distinct(model.parameters()), SGDOptions(is_last(run) ? 0.2 : 0.1));
      train_steps(run, model, optimizer, 3);
    });

// Sharpness-aware minimization, by each rank's own gradient. At stage 3 ranks have no whole parameters of their own.
const int kPerturbs = is_right(
    kGroup,
    "moves parameters by each rank's own gradient for one backward, and back, at stages 0 to 2",
    [](auto& run) {
      auto model = run.wrap(make<Mlp>());
      auto optimizer = run.template optimizer<SGD>(model, SGDOptions(0.1));
      for (int step = 0; step < 3; ++step) {
        optimizer->zero_grad();
        Values before;
        {
          const auto guard = run.no_sync(model);
          backward_of_step(run, model, step);
        }
        {
          const torch::NoGradGuard no_grad;
          for (torch::Tensor parameter : model.parameters()) {
            before.push_back(parameter.detach().clone());
            parameter.add_(parameter.grad(), 0.05);
          }
        }
        optimizer->zero_grad();
        backward_of_step(run, model, step);
        {
          const torch::NoGradGuard no_grad;
          const auto parameters = model.parameters();
          for (size_t i = 0; i < before.size(); ++i) torch::Tensor(parameters[i]).copy_(before[i]);
        }
        optimizer->step();
      }
      return run.values(model);
    },
    {.over = Over::kFp32, .up_to_stage = 2});

const int kSwapsAlone = is_right(
    kGroup,
    "evaluates on rank 0 alone with other weights that it copies in and back, at stages 0 to 2",
    [](auto& run) {
      auto model = run.wrap(make<Mlp>());
      auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
      for (int step = 0; step < 3; ++step) {
        train_step(run, model, *optimizer, step);
        if (run.rank() != 0) continue;
        const torch::NoGradGuard no_grad;
        for (torch::Tensor parameter : model.parameters()) {
          const torch::Tensor trained = parameter.detach().clone();
          parameter.zero_();
          model(samples_of(0, step).inputs);
          parameter.copy_(trained);
        }
      }
      return run.values(model);
    },
    {.over = Over::kFp32, .up_to_stage = 2});

}  // namespace
}  // namespace zeropage::habits_of_agreement
