// How scripts make, change and step optimizers.
#include "tests/habits/scripts.h"
#include "tests/harness/disk_folder.h"

namespace zeropage::habits_of_optimizers {
namespace {

using namespace zeropage::testing;

constexpr const char* kGroup = "Optimizers";
const RightOptions kInFp32{.over = Over::kFp32};

const int kAdamW = is_right(kGroup, "steps AdamW over all parameters", [](auto& run) {
  auto model = run.wrap(make<Mlp>());
  auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
  train_steps(run, model, *optimizer, 4);
  return run.values(model);
});

const int kMomentum = is_right(kGroup, "steps SGD with momentum and weight decay", [](auto& run) {
  auto model = run.wrap(make<Oddball>());
  auto optimizer =
      run.template optimizer<SGD>(model, SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
  train_steps(run, model, *optimizer, 4);
  return run.values(model);
});

const int kTwo = is_right(kGroup, "has two optimizers on one model", [](auto& run) {
  auto model = run.wrap(make<Mlp>());
  auto first =
      run.template optimizer_of<AdamW>(model, model->first->parameters(), AdamWOptions(0.01));
  auto second = run.template optimizer_of<SGD>(model, model->last->parameters(), SGDOptions(0.1));
  for (int step = 0; step < 4; ++step) {
    model.zero_grad();
    backward_of_step(run, model, step);
    first->step();
    second->step();
  }
  return run.values(model);
});

const int kScheduled = is_right(kGroup, "changes the learning rate by a scheduler", [](auto& run) {
  auto model = run.wrap(make<Mlp>());
  auto optimizer = run.template optimizer<SGD>(model, SGDOptions(0.5));
  torch::optim::StepLR scheduler(*optimizer, 1, 0.5);
  for (int step = 0; step < 4; ++step) {
    train_step(run, model, *optimizer, step);
    scheduler.step();
  }
  return run.values(model);
});

const int kByHand =
    is_right(kGroup, "sets options of a parameter group in the middle of a run", [](auto& run) {
      auto model = run.wrap(make<Mlp>());
      auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
      train_steps(run, model, *optimizer, 2);
      for (auto& group : optimizer->param_groups()) {
        static_cast<AdamWOptions&>(group.options()).lr(0.002).weight_decay(0.3);
      }
      train_steps(run, model, *optimizer, 2, 2);
      return run.values(model);
    });

const int kClosure = is_right(kGroup, "gives step() a closure", [](auto& run) {
  auto model = run.wrap(make<Mlp>());
  auto optimizer = run.template optimizer<SGD>(model, SGDOptions(0.1));
  for (int step = 0; step < 3; ++step) {
    const auto closure = [&] {
      optimizer->zero_grad();
      const torch::Tensor loss = loss_of_step(run, model, step);
      run.backward(loss);
      return loss;
    };
    if constexpr (std::decay_t<decltype(run)>::kOurs) {
      optimizer->step(closure);
    } else {
      closure();
      optimizer->step();
    }
  }
  return run.values(model);
});

const int kZeroes = is_right(kGroup, "zeroes gradients instead of dropping them", [](auto& run) {
  auto model = run.wrap(make<Mlp>());
  auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
  for (int step = 0; step < 3; ++step) {
    optimizer->zero_grad(/*set_to_none=*/false);
    backward_of_step(run, model, step);
    optimizer->step();
  }
  return run.values(model);
});

const int kSkips = is_right(kGroup, "leaves out a step and drops its gradients", [](auto& run) {
  auto model = run.wrap(make<Mlp>());
  auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
  for (int step = 0; step < 4; ++step) {
    optimizer->zero_grad();
    backward_of_step(run, model, step);
    if (step != 1) optimizer->step();
  }
  return run.values(model);
});

const int kAddsGroup = is_right(
    kGroup, "adds a parameter group after some steps",
    [](auto& run) {
      auto model = run.wrap(make<Mlp>());
      auto optimizer =
          run.template optimizer_of<SGD>(model, model->first->parameters(), SGDOptions(0.1));
      train_steps(run, model, *optimizer, 2);
      optimizer->add_param_group(torch::optim::OptimizerParamGroup(model->last->parameters()));
      train_steps(run, model, *optimizer, 2, 2);
      return run.values(model);
    },
    kInFp32);

const int kPlainClass = is_right(
    kGroup, "steps a torch::optim class on the wrapped model's parameters",
    [](auto& run) {
      auto model = run.wrap(make<Mlp>());
      AdamW optimizer(distinct(model.parameters()), AdamWOptions(0.01));
      train_steps(run, model, optimizer, 4);
      return run.values(model);
    },
    kInFp32);

const int kMadeBefore = is_right(
    kGroup, "makes a torch::optim optimizer before wrapping the model",
    [](auto& run) {
      Mlp module = make<Mlp>();
      AdamW optimizer(module->parameters(), AdamWOptions(0.01));
      auto model = run.wrap(module);
      train_steps(run, model, optimizer, 4);
      return run.values(model);
    },
    kInFp32);

const int kUpdatesByHand = is_right(
    kGroup, "updates parameters by hand from p.grad()",
    [](auto& run) {
      auto model = run.wrap(make<Mlp>());
      for (int step = 0; step < 3; ++step) {
        model.zero_grad();
        backward_of_step(run, model, step);
        const torch::NoGradGuard no_grad;
        for (torch::Tensor parameter : model.parameters()) parameter.sub_(parameter.grad() * 0.1);
      }
      return run.values(model);
    },
    kInFp32);

const int kDecaysByHand =
    is_right(kGroup, "decays weights by hand before each step", [](auto& run) {
      auto model = run.wrap(make<Mlp>());
      auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01).weight_decay(0));
      for (int step = 0; step < 4; ++step) {
        optimizer->zero_grad();
        backward_of_step(run, model, step);
        {
          const torch::NoGradGuard no_grad;
          for (torch::Tensor parameter : model.parameters()) parameter.mul_(0.75);
        }
        optimizer->step();
      }
      return run.values(model);
    });

const int kUnfreezes = is_right(
    kGroup, "makes the optimizer while a layer is frozen and unfreezes it later", [](auto& run) {
      auto model = run.wrap(make<Mlp>());
      for (torch::Tensor parameter : model->second->parameters()) parameter.requires_grad_(false);
      auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
      train_steps(run, model, *optimizer, 2);
      for (torch::Tensor parameter : model->second->parameters()) parameter.requires_grad_(true);
      train_steps(run, model, *optimizer, 3, 2);
      return run.values(model);
    });

const int kUnfreezesWrapped =
    is_right(kGroup, "wraps the model with a frozen layer and unfreezes it later", [](auto& run) {
      Mlp module = make<Mlp>();
      // What is frozen keeps the model's precision, and master weights begin with that.
      for (torch::Tensor parameter : module->parameters()) {
        parameter.set_data(parameter.detach().to(torch::kBFloat16).to(torch::kFloat));
      }
      for (torch::Tensor parameter : module->second->parameters()) parameter.requires_grad_(false);
      for (torch::Tensor parameter : module->first->parameters()) parameter.requires_grad_(false);
      auto model = run.wrap(module);
      auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
      train_steps(run, model, *optimizer, 2);
      module->second->bias.requires_grad_(true);
      train_steps(run, model, *optimizer, 1, 2);
      for (torch::Tensor parameter : module->parameters()) parameter.requires_grad_(true);
      train_steps(run, model, *optimizer, 2, 3);
      module->first->weight.requires_grad_(false);
      train_steps(run, model, *optimizer, 2, 5);
      return run.values(model);
    });

const int kResumesFrozen = is_right(
    kGroup, "resumes with a layer frozen that had been trained, and unfreezes it later",
    [](auto& run) {
      const DiskFolder folder;
      using Run = std::decay_t<decltype(run)>;
      const auto freeze = [](auto& module, bool is_frozen) {
        for (torch::Tensor parameter : module->first->parameters()) {
          parameter.requires_grad_(!is_frozen);
        }
      };
      const auto go_on = [&](auto& model, auto& optimizer) {
        freeze(model, true);
        train_steps(run, model, optimizer, 1, 2);
        freeze(model, false);
        train_steps(run, model, optimizer, 2, 3);
        return run.values(model);
      };
      auto model = run.wrap(make<Mlp>());
      auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
      train_steps(run, model, *optimizer, 2);
      if constexpr (Run::kOurs) {
        // All ranks name one folder.
        const std::string shared =
            run.world().gather_text("the folder", folder.path() + "/state").front();
        save_state(shared, model, dynamic_cast<ShardedOptimizer&>(*optimizer));
        Mlp module = make<Mlp>();
        freeze(module, true);
        auto resumed = run.wrap(module);
        auto its_own = run.template optimizer<AdamW>(resumed, AdamWOptions(0.01));
        load_state(shared, resumed, dynamic_cast<ShardedOptimizer&>(*its_own));
        // The first rank's folder goes with its script.
        run.world().gather_text("the end", "");
        return go_on(resumed, *its_own);
      } else {
        return go_on(model, *optimizer);
      }
    },
    kInFp32);

const int kFreezes = is_right(kGroup, "freezes a layer in the middle of a run", [](auto& run) {
  auto model = run.wrap(make<Mlp>());
  auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
  train_steps(run, model, *optimizer, 2);
  for (torch::Tensor parameter : model->first->parameters()) parameter.requires_grad_(false);
  train_steps(run, model, *optimizer, 2, 2);
  return run.values(model);
});

const int kToggles =
    is_right(kGroup, "toggles requires_grad_ of a layer every step", [](auto& run) {
      auto model = run.wrap(make<Mlp>());
      auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
      for (int step = 0; step < 5; ++step) {
        for (torch::Tensor parameter : model->second->parameters()) {
          parameter.requires_grad_(step % 2 == 0);
        }
        train_step(run, model, *optimizer, step);
      }
      return run.values(model);
    });

const int kThrowing =
    is_right(kGroup, "goes on after an optimizer's constructor threw", [](auto& run) {
      auto model = run.wrap(make<Mlp>());
      if constexpr (std::decay_t<decltype(run)>::kOurs) {
        EXPECT_NE(error_of([&] {
                    run.template optimizer<SGD>(model, SGDOptions(run.rank() == 0 ? 0.1 : 0.2));
                  }),
                  run.ranks() == 1 ? "never said" : "");
      }
      auto optimizer = run.template optimizer<SGD>(model, SGDOptions(0.1));
      train_steps(run, model, *optimizer);
      return run.values(model);
    });

const int kOldGraph = is_refused(
    kGroup, "runs backward over a graph from before step()",
    "has been modified by an inplace operation", "run backward() before step()", [](auto& run) {
      auto model = run.wrap(make<Mlp>());
      auto optimizer = run.template optimizer<SGD>(model, SGDOptions(0.1));
      backward_of_step(run, model, 0);
      const torch::Tensor loss = loss_of_step(run, model, 1);
      optimizer->step();
      run.backward(loss);
    });

const int kForeignParameter = is_refused(
    kGroup, "gives the optimizer a parameter that the model has not",
    "is not a parameter of the wrapped module", "step what was wrapped, one wrapper a model",
    [](auto& run) {
      auto model = run.wrap(make<Mlp>());
      run.template optimizer_of<SGD>(model, torch::nn::Linear(2, 2)->parameters(), SGDOptions(0.1));
    });

// A step, an edit of what LibTorch's optimizers let one edit, and another step.
template <typename Edit>
int edit_is_refused(std::string does, std::string words, std::string instead, const Edit& edit) {
  return is_refused(kGroup, std::move(does), std::move(words), std::move(instead),
                    [edit](auto& run) {
                      auto model = run.wrap(make<Mlp>());
                      auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
                      train_step(run, model, *optimizer, 0);
                      edit(*optimizer, model);
                      train_step(run, model, *optimizer, 1);
                    },
                    {.stages = {0, 3}});
}

const int kPopsAParameter = edit_is_refused(
    "takes a parameter out of a group after a step", "expected parameter group 0 with the 6",
    "freeze it by `requires_grad_(false)`",
    [](auto& optimizer, auto&) { optimizer.param_groups()[0].params().pop_back(); });

const int kClearsGroups = edit_is_refused(
    "clears param_groups()", "expected the optimizer's 1 parameter groups, got 0", "set `lr` to 0",
    [](auto& optimizer, auto&) { optimizer.param_groups().clear(); });

const int kWritesState = edit_is_refused(
    "puts a state of its own into state()",
    "something was put into the optimizer's state(), changed in it or taken out of it",
    "set states by load_state(), or make the optimizer anew", [](auto& optimizer, auto& model) {
      optimizer.state()[model.parameters().front().unsafeGetTensorImpl()] =
          std::make_unique<torch::optim::AdamWParamState>();
    });

const int kClearsState = edit_is_refused(
    "clears state(), to begin without momentum",
    "something was put into the optimizer's state(), changed in it or taken out of it",
    "make the optimizer anew", [](auto& optimizer, auto&) { optimizer.state().clear(); });

const int kZeroesMoments =
    edit_is_refused("zeroes exp_avg in a loop over state()",
                    "state() of the sharded torch::optim::AdamW: aten::zero_ would see no values",
                    "make the optimizer anew", [](auto& optimizer, auto&) {
                      for (auto& [parameter, state] : optimizer.state()) {
                        static_cast<torch::optim::AdamWParamState&>(*state).exp_avg().zero_();
                      }
                    });

const int kSetsSteps =
    edit_is_refused("sets a state's count of steps in a loop over state()", "changed in it",
                    "make the optimizer anew", [](auto& optimizer, auto&) {
                      for (auto& [parameter, state] : optimizer.state()) {
                        static_cast<torch::optim::AdamWParamState&>(*state).step(0);
                      }
                    });

const int kReadsMoments = edit_is_refused(
    "reads a moment's norm from state()", "would see no values",
    "read states by `visit_owned_shards()`", [](auto& optimizer, auto& model) {
      const auto& state = *optimizer.state().at(model.parameters().front().unsafeGetTensorImpl());
      static_cast<const torch::optim::AdamWParamState&>(state).exp_avg_sq().norm();
    });

}  // namespace
}  // namespace zeropage::habits_of_optimizers
