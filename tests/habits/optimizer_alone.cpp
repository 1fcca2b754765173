// A plain LibTorch script whose optimizer alone is Zeropage's. LibTorch's run has the mean of the ranks' gradients behind each
// backward, and so has this one.
#include "tests/habits/scripts.h"
#include "tests/harness/disk_folder.h"

namespace zeropage::habits_of_optimizer_alone {
namespace {

using namespace zeropage::testing;

constexpr const char* kGroup = "An optimizer without a wrapper";

// A script runs on the plain module, at the stages that an optimizer alone has.
class AloneRun {
 public:
  static constexpr bool kOurs = true;

  AloneRun(World& world, const Setting& setting) : world_(world), setting_(setting) {
    options.stage = stage_of(setting.stage);
    options.page_bytes = 4_KiB;
    options.update_by = UpdateBy::kClass;
  }

  int rank() const { return world_.rank(); }
  int ranks() const { return world_.size(); }
  const Setting& setting() const { return setting_; }
  World& world() { return world_; }

  template <typename M>
  PlainModel<M> wrap(M module) {
    return {std::move(module), /*is_bf16=*/false};
  }
  template <typename A, typename Model, typename AlgorithmOptions>
  std::unique_ptr<torch::optim::Optimizer> optimizer(Model& model,
                                                     const AlgorithmOptions& of_class) {
    return optimizer_of<A>(model, distinct(model.parameters()), of_class);
  }
  template <typename A, typename Model, typename AlgorithmOptions>
  std::unique_ptr<torch::optim::Optimizer> optimizer_of(Model&,
                                                        const std::vector<torch::Tensor>& of,
                                                        const AlgorithmOptions& of_class) {
    auto made = std::make_unique<Optimizer<A>>(of, world_, of_class, options);
    optimizer_ = made.get();
    return made;
  }

  template <typename Function>
  auto forward(const Function& function) {
    return function();
  }
  auto no_sync(auto& /*model*/) { return optimizer_->no_sync(); }
  void backward(const torch::Tensor& loss, const torch::Tensor& gradient = {},
                bool keep_graph = false) {
    loss.backward(gradient, keep_graph);
  }
  void end_backward() {}
  template <typename Model, typename Loss, typename Change>
  void accumulate(Model&, torch::optim::Optimizer& optimizer, int count, const Loss& loss,
                  const Change& change) {
    Accumulator accumulator(*optimizer_, {.micro_steps = count});
    for (int micro = 0; micro < count; ++micro) accumulator.backward(loss(micro));
    change();
    accumulator.step(optimizer);
  }
  template <typename Model>
  double clip(Model&, double most) {
    return clip_grad_norm_(*optimizer_, most).before;
  }
  template <typename Model>
  Values values(Model& model) {
    Values all;
    for (const auto& parameter : model.parameters()) all.push_back(parameter.detach().clone());
    return all;
  }

  Options options;

 private:
  World& world_;
  const Setting setting_;
  ShardedOptimizer* optimizer_ = nullptr;  // made last
};

// On 1, 2 and 3 ranks.
template <typename Script>
int is_right_alone(std::string does, const Script& script, double tolerance = 0) {
  return add_habit({kGroup, std::move(does), "", [script, tolerance] {
                      for (const int ranks : {1, 2, 3}) {
                        std::vector<Values> expected;
                        for (const int stage : {0, 1}) {
                          const Setting setting{.stage = stage, .ranks = ranks};
                          SCOPED_TRACE(::testing::Message() << setting);
                          if (expected.empty()) {
                            expected = values_of_ranks(setting, script, [&](World& world) {
                              return PlainRun(world, setting);
                            });
                          }
                          const auto actual = values_of_ranks(setting, script, [&](World& world) {
                            return AloneRun(world, setting);
                          });
                          expect_alike(expected, actual, setting, tolerance);
                        }
                      }
                    }});
}

// words: part of what every rank is told.
template <typename Script>
int is_refused_alone(std::string does, std::string words, std::string instead, const Script& script,
                     std::vector<int> stages = {0, 1}) {
  return add_habit({kGroup, std::move(does), std::move(instead), [script, words, stages] {
                      for (const int stage : stages) {
                        const Setting setting{.stage = stage, .ranks = 2};
                        SCOPED_TRACE(::testing::Message() << setting);
                        const auto errors = try_ranks(setting.ranks, [&](World& world) {
                          AloneRun run(world, setting);
                          script(run);
                        });
                        for (const std::exception_ptr& error : errors) {
                          EXPECT_NE(message_of(error).find(words), std::string::npos)
                              << "it said: \"" << message_of(error) << "\"";
                        }
                      }
                    }});
}

const int kTrains = is_right_alone("trains a plain module", [](auto& run) {
  return trained_by<AdamW, Oddball>(run, AdamWOptions(0.01), 3, [&](auto& model, int step) {
    backward_of_step(run, model, step);
  });
});

const int kClipsByTorch = is_right_alone(
    "clips a plain module's gradients by torch::nn::utils::clip_grad_norm_", [](auto& run) {
      return trained_by<AdamW, Mlp>(run, AdamWOptions(0.01), 3, [&](auto& model, int step) {
        backward_of_step(run, model, step);
        torch::nn::utils::clip_grad_norm_(model.parameters(), 0.05);
      });
    });

const int kClipsValues = is_right_alone(
    "clips a plain module's gradients by torch::nn::utils::clip_grad_value_", [](auto& run) {
      return trained_by<AdamW, Mlp>(run, AdamWOptions(0.01), 3, [&](auto& model, int step) {
        backward_of_step(run, model, step);
        torch::nn::utils::clip_grad_value_(model.parameters(), 0.001);
      });
    });

const int kClips = is_right_alone(
    "clips by zeropage::clip_grad_norm_(optimizer, ...)",
    [](auto& run) {
      return trained_by<AdamW, Mlp>(run, AdamWOptions(0.01), 3, [&](auto& model, int step) {
        backward_of_step(run, model, step);
        run.clip(model, 0.05);
      });
    },
    1e-5);

const int kLoopsOverNorms =
    is_right_alone("scales gradients by a norm of a loop of its own", [](auto& run) {
      return trained_by<SGD, Mlp>(run, SGDOptions(0.1), 3, [&](auto& model, int step) {
        backward_of_step(run, model, step);
        double squares = 0;
        for (const auto& parameter : model.parameters()) {
          squares += std::pow(parameter.grad().norm().template item<double>(), 2);
        }
        for (auto& parameter : model.parameters()) {
          parameter.mutable_grad().mul_(1 / (1 + std::sqrt(squares)));
        }
      });
    });

const int kRepeats = is_right_alone(
    "runs two backwards before a step, and clips",
    [](auto& run) {
      return trained_by<AdamW, Mlp>(run, AdamWOptions(0.01), 3, [&](auto& model, int step) {
        backward_of_step(run, model, 10 * step);
        backward_of_step(run, model, 10 * step + 1);
        torch::nn::utils::clip_grad_norm_(model.parameters(), 0.05);
      });
    },
    1e-5);

const int kNoSync = is_right_alone("accumulates under the optimizer's no_sync()", [](auto& run) {
  auto model = run.wrap(make<Mlp>());
  auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
  for (int step = 0; step < 3; ++step) {
    optimizer->zero_grad();
    {
      const auto guard = run.no_sync(model);
      backward_of_step(run, model, 10 * step);
    }
    backward_of_step(run, model, 10 * step + 1);
    optimizer->step();
  }
  return run.values(model);
});

const int kAccumulates = is_right_alone(
    "makes a step of several micro-batches by an Accumulator of the optimizer, and clips",
    [](auto& run) {
      auto model = run.wrap(make<Mlp>());
      auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
      for (int step = 0; step < 3; ++step) {
        run.accumulate(
            model, *optimizer, 2,
            [&](int micro) { return loss_of_step(run, model, 10 * step + micro); },
            [&] { torch::nn::utils::clip_grad_norm_(model.parameters(), 0.05); });
      }
      return run.values(model);
    },
    1e-5);

const int kTwo =
    is_right_alone("has an optimizer for each of two parts of a module", [](auto& run) {
      auto model = run.wrap(make<Mlp>());
      auto first =
          run.template optimizer_of<AdamW>(model, model->first->parameters(), AdamWOptions(0.01));
      auto last = run.template optimizer_of<SGD>(model, model->last->parameters(), SGDOptions(0.1));
      for (int step = 0; step < 3; ++step) {
        // One that no optimizer has is each rank's own.
        for (auto& parameter : model->second->parameters()) parameter.requires_grad_(false);
        first->zero_grad();
        last->zero_grad();
        backward_of_step(run, model, step);
        torch::nn::utils::clip_grad_norm_(model->last->parameters(), 0.05);
        first->step();
        last->step();
      }
      return run.values(model);
    });

const int kUnfreezes =
    is_right_alone("freezes a layer of a plain module, and unfreezes it", [](auto& run) {
      auto model = run.wrap(make<Mlp>());
      for (auto& parameter : model->first->parameters()) parameter.requires_grad_(false);
      auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
      for (int step = 0; step < 4; ++step) {
        for (auto& parameter : model->first->parameters()) parameter.requires_grad_(step >= 2);
        train_step(run, model, *optimizer, step);
      }
      return run.values(model);
    });

const int kLeavesOutBackward = is_right_alone(
    "runs no backward on the last rank, whose batch is empty, but step() on all", [](auto& run) {
      return trained_by<AdamW, Mlp>(run, AdamWOptions(0.01), 3, [&](auto& model, int step) {
        if (run.ranks() > 1 && run.rank() == run.ranks() - 1) {
          run.end_backward();
        } else {
          backward_of_step(run, model, step);
        }
      });
    });

const int kResumes = is_right_alone(
    "saves the state of a plain module and its optimizer, and goes on from it", [](auto& run) {
      const DiskFolder folder;
      const auto path = std::filesystem::path(folder.path()) / "state";
      using Run = std::decay_t<decltype(run)>;
      auto model = run.wrap(make<Mlp>());
      auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
      train_steps(run, model, *optimizer, 2);
      if constexpr (Run::kOurs) {
        // All ranks name one folder.
        const std::string shared = run.world().gather_text("the folder", path.string()).front();
        save_state(shared, model.module(), dynamic_cast<ShardedOptimizer&>(*optimizer));
        auto resumed = run.wrap(make<Mlp>());
        auto its_own = run.template optimizer<AdamW>(resumed, AdamWOptions(0.5));
        load_state(shared, resumed.module(), dynamic_cast<ShardedOptimizer&>(*its_own));
        train_steps(run, resumed, *its_own, 2, 2);
        // The first rank's folder goes with its script.
        run.world().gather_text("the end", "");
        return run.values(resumed);
      } else {
        train_steps(run, model, *optimizer, 2, 2);
        return run.values(model);
      }
    });

const int kReadsAlone =
    is_refused_alone("reads p.grad() of a plain module on rank 0 alone at stage 1",
                     "zeropage::GatheredGradients", "read it on all ranks",
                     [](auto& run) {
                       auto model = run.wrap(make<Mlp>());
                       auto optimizer = run.template optimizer<SGD>(model, SGDOptions(0.1));
                       backward_of_step(run, model, 0);
                       if (run.rank() == 0)
                         model->last->weight.grad().norm().template item<float>();
                       optimizer->step();
                     },
                     {1});

const int kSavesByTorch =
    is_refused_alone("saves the optimizer of a plain module by torch::save",
                     "zeropage::save_state(directory, module, optimizer)",
                     "`save_state(folder, net, optimizer)`", [](auto& run) {
                       auto model = run.wrap(make<Mlp>());
                       auto optimizer = run.template optimizer<SGD>(model, SGDOptions(0.1));
                       std::stringstream out;
                       torch::save(*optimizer, out);
                     });

const int kStageTwo = is_refused_alone("asks for stage 2 without a wrapper",
                                       "stages 2 and 3 need zeropage::DistributedDataParallel",
                                       "wrap the module", [](auto& run) {
                                         auto model = run.wrap(make<Mlp>());
                                         run.options.stage = Stage::kGradients;
                                         run.template optimizer<SGD>(model, SGDOptions(0.1));
                                       });

}  // namespace
}  // namespace zeropage::habits_of_optimizer_alone
