// How scripts read, write, load and average parameters.
#include <cstring>
#include <filesystem>

#include "tests/habits/scripts.h"
#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"

namespace zeropage::habits_of_parameters {
namespace {

using namespace zeropage::testing;

constexpr const char* kGroup = "Parameters";
const RightOptions kInFp32{.over = Over::kFp32};

// Trains, changes the model, trains on.
template <typename Run, typename Change>
Values trained_around(Run& run, const Change& change) {
  auto model = run.wrap(make<Mlp>());
  auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
  train_steps(run, model, *optimizer, 2);
  change(model);
  train_steps(run, model, *optimizer, 3, 2);
  return run.values(model);
}

// The bytes of a whole tensor, as a kernel of the user's would write them.
void write_past_the_dispatcher(const torch::Tensor& tensor, float value) {
  const torch::Tensor values = torch::full(tensor.sizes(), value, tensor.scalar_type());
  std::memcpy(tensor.data_ptr(), values.const_data_ptr(), values.nbytes());
}

const int kAverages =
    is_right(kGroup, "keeps an exponential moving average of the parameters", [](auto& run) {
      auto model = run.wrap(make<Mlp>());
      auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
      Values averages = run.values(model);
      for (int step = 0; step < 3; ++step) {
        train_step(run, model, *optimizer, step);
        const torch::NoGradGuard no_grad;
        const auto parameters = model.parameters();
        for (size_t i = 0; i < averages.size(); ++i) {
          averages[i].mul_(0.75).add_(parameters[i].detach(), 0.25);
        }
      }
      return averages;
    });

const int kSwaps =
    is_right(kGroup, "swaps averaged weights in for an evaluation, and back", [](auto& run) {
      auto model = run.wrap(make<Mlp>());
      auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
      const Values averages = run.values(model);
      Values all;
      for (int step = 0; step < 3; ++step) {
        train_step(run, model, *optimizer, step);
        const torch::NoGradGuard no_grad;
        const Values trained = run.values(model);
        const auto swap_in = [&](const Values& values) {
          const auto guard = run.gathered(model, Modified::on_every_rank());
          const auto parameters = model.parameters();
          for (size_t i = 0; i < values.size(); ++i) torch::Tensor(parameters[i]).copy_(values[i]);
        };
        swap_in(averages);
        all.push_back(model(samples_of(run.rank(), step).inputs).clone());
        swap_in(trained);
      }
      for (const torch::Tensor& values : run.values(model)) all.push_back(values);
      return all;
    });

const int kClamps = is_right(kGroup, "clamps parameters every step", [](auto& run) {
  auto model = run.wrap(make<Mlp>());
  auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
  for (int step = 0; step < 5; ++step) {
    train_step(run, model, *optimizer, step);
    const torch::NoGradGuard no_grad;
    for (torch::Tensor parameter : model.parameters()) parameter.clamp_(-0.15, 0.15);
  }
  return run.values(model);
});

const int kClampsData = is_right(kGroup, "clamps parameters through .data()", [](auto& run) {
  auto model = run.wrap(make<Mlp>());
  auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
  for (int step = 0; step < 5; ++step) {
    train_step(run, model, *optimizer, step);
    for (const torch::Tensor& parameter : model.parameters()) parameter.data().clamp_(-0.15, 0.15);
  }
  return run.values(model);
});

const int kOneWrite = is_right(kGroup, "writes to parameters once, by an operator", [](auto& run) {
  return trained_around(run, [](auto& model) {
    const torch::NoGradGuard no_grad;
    model->second->weight.mul_(0.5);
    model->first->bias.narrow(0, 3, 2).fill_(0.25);
  });
});

const int kPretrained = is_right(
    kGroup, "copies pretrained values in on rank 0, under Modified::on_rank(0)", [](auto& run) {
      return trained_around(run, [&](auto& model) {
        const torch::NoGradGuard no_grad;
        const auto guard = run.gathered(model, Modified::on_rank(0));
        if (std::decay_t<decltype(run)>::kOurs && run.rank() != 0) return;
        for (torch::Tensor parameter : model.parameters()) {
          parameter.copy_(torch::arange(parameter.numel(), torch::kFloat)
                              .view(parameter.sizes())
                              .mul(0.001)
                              .sub(0.1));
        }
      });
    });

const int kRaw =
    is_right(kGroup, "writes to memory itself, under Modified::on_every_rank()", [](auto& run) {
      return trained_around(run, [&](auto& model) {
        const auto guard = run.gathered(model, Modified::on_every_rank());
        write_past_the_dispatcher(model->second->weight, 0.01F);
        write_past_the_dispatcher(model->last->bias, -0.3F);
      });
    });

const int kReinitialises =
    is_right(kGroup, "initialises a layer anew in the middle of a run", [](auto& run) {
      return trained_around(run, [&](auto& model) {
        const auto guard = run.gathered(model, Modified::on_every_rank());
        torch::nn::init::constant_(model->second->weight, 0.02);
        torch::nn::init::zeros_(model->second->bias);
      });
    });

// A file of an Mlp with all parameters at `value`.
std::filesystem::path file_with(const DiskFolder& folder, float value) {
  Mlp saved = make<Mlp>();
  const torch::NoGradGuard no_grad;
  for (torch::Tensor parameter : saved->parameters()) parameter.fill_(value);
  const auto path = std::filesystem::path(folder.path()) / "weights.pt";
  torch::save(saved, path.string());
  return path;
}

const int kLoads =
    is_right(kGroup, "loads a plain checkpoint by torch::load, under Modified::on_every_rank()",
             [](auto& run) {
               const DiskFolder folder;
               const auto path = file_with(folder, 0.05F);
               return trained_around(run, [&](auto& model) {
                 const auto guard = run.gathered(model, Modified::on_every_rank());
                 if constexpr (std::decay_t<decltype(run)>::kOurs) {
                   torch::load(model.module(), path.string());
                 } else {
                   const torch::NoGradGuard no_grad;
                   for (torch::Tensor parameter : model.parameters()) parameter.fill_(0.05F);
                 }
               });
             });

const int kLoadsBare =
    is_refused(kGroup, "loads a plain checkpoint by torch::load without a guard",
               "zeropage::GatheredParameters",
               "load under GatheredParameters with Modified, or before wrapping", [](auto& run) {
                 const DiskFolder folder;
                 const auto path = file_with(folder, 0.05F);
                 auto model = run.wrap(make<Mlp>());
                 torch::load(model.module(), path.string());
                 backward_of_step(run, model, 0);
               });

const int kLoadsAndSaves =
    is_refused(kGroup, "loads without a guard, and saves", "zeropage::GatheredParameters",
               "load under GatheredParameters with Modified, or before wrapping", [](auto& run) {
                 const DiskFolder folder;
                 const auto path = file_with(folder, 0.05F);
                 auto model = run.wrap(make<Mlp>());
                 auto optimizer = std::make_unique<Optimizer<SGD>>(model, SGDOptions(0.1));
                 torch::load(model.module(), path.string());
                 save_weights(std::filesystem::path(folder.path()) / "state", model);
               });

const int kSwapsMemory = is_right(
    kGroup,
    "evaluates with other weights by set_data(), and sets the old ones back, at stages 0 to 2",
    [](auto& run) {
      auto model = run.wrap(make<Mlp>());
      auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
      for (int step = 0; step < 3; ++step) {
        train_step(run, model, *optimizer, step);
        if (run.setting().stage == 3) continue;
        const torch::NoGradGuard no_grad;
        torch::Tensor bias = model->last->bias;
        const torch::Tensor trained = bias.data();
        bias.set_data(torch::zeros_like(trained));
        const torch::Tensor outputs = model(samples_of(run.rank(), 99).inputs);
        EXPECT_FALSE(outputs.isnan().any().template item<bool>());
        bias.set_data(trained);
      }
      return run.values(model);
    });

const int kCasts = is_refused(kGroup, "casts the model by ->to() after wrapping it", "->to()",
                              "cast before wrapping, or set options.compute_dtype", [](auto& run) {
                                auto model = run.wrap(make<Mlp>());
                                model->to(torch::kDouble);
                                backward_of_step(run, model, 0);
                              });

const int kReadsNorms = is_right(kGroup, "reads norms of parameters every step", [](auto& run) {
  auto model = run.wrap(make<Mlp>());
  auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
  Values all;
  for (int step = 0; step < 3; ++step) {
    train_step(run, model, *optimizer, step);
    const torch::NoGradGuard no_grad;
    for (const auto& parameter : model.parameters()) all.push_back(parameter.norm().clone());
  }
  return all;
});

const int kCopies = is_right(kGroup, "copies parameters by detach().clone()", [](auto& run) {
  auto model = run.wrap(make<Mlp>());
  auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
  train_steps(run, model, *optimizer);
  Values copies;
  for (const auto& parameter : model.parameters()) copies.push_back(parameter.detach().clone());
  train_steps(run, model, *optimizer, 1, 3);
  return copies;
});

const int kFullState =
    is_right(kGroup, "takes all values to rank 0 by full_state()", [](auto& run) {
      auto model = run.wrap(make<Mlp>());
      auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
      train_steps(run, model, *optimizer);
      if constexpr (!std::decay_t<decltype(run)>::kOurs) {
        return run.rank() == 0 ? run.values(model) : Values();
      } else {
        Values all;
        for (const auto& named : full_state(model)) all.push_back(named.value());
        return all;
      }
    });

const int kLooksAlone = is_right(
    kGroup, "looks at parameters on rank 0 alone, under a guard, between forward and backward",
    [](auto& run) {
      return trained_by<AdamW, Mlp>(run, AdamWOptions(0.01), 4, [&](auto& model, int step) {
        const torch::Tensor loss = loss_of_step(run, model, step);
        {
          const torch::NoGradGuard no_grad;
          const auto guard = run.gathered(model, Modified::nowhere());
          if (run.rank() == 0) {
            EXPECT_GT(model->second->weight.norm().template item<double>(), 0);
          }
        }
        run.backward(loss);
      });
    });

const int kWrapsTwice = is_refused(kGroup, "wraps a model twice", "is wrapped already",
                                   "wrap once, and share the wrapper", [](auto& run) {
                                     Mlp module = make<Mlp>();
                                     auto model = run.wrap(module);
                                     auto again = run.wrap(module);
                                   });

const int kWrapsForOptimizer =
    is_refused(kGroup, "gives a bare optimizer the parameters of a wrapped model",
               "is wrapped already", "give zeropage::Optimizer the wrapper", [](auto& run) {
                 auto model = run.wrap(make<Mlp>());
                 const Optimizer<SGD> optimizer(model.parameters(), run.world(), SGDOptions(0.1));
               });

const int kAddsModule =
    is_refused(kGroup, "registers a module after wrapping", "registered or replaced after",
               "register it before wrapping", [](auto& run) {
                 auto model = run.wrap(make<Mlp>());
                 model->register_module("late", torch::nn::Linear(7, 7));
                 backward_of_step(run, model, 0);
               });

const int kSavesAlone =
    is_refused(kGroup, "saves on rank 0 alone", "saving", "save on all ranks",
               [](auto& run) {
                 const DiskFolder folder;
                 auto model = run.wrap(make<Mlp>());
                 auto optimizer = run.template optimizer<SGD>(model, SGDOptions(0.1));
                 train_steps(run, model, *optimizer, 1);
                 if (run.rank() == 0)
                   save_weights(std::filesystem::path(folder.path()) / "state", model);
                 train_steps(run, model, *optimizer, 1);
               },
               {.stages = {1, 3}});

}  // namespace
}  // namespace zeropage::habits_of_parameters
