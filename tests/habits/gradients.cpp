// How scripts read, change and accumulate gradients.
#include "tests/habits/scripts.h"

namespace zeropage::habits_of_gradients {
namespace {

using namespace zeropage::testing;

constexpr const char* kGroup = "Gradients";
const RightOptions kInFp32{.over = Over::kFp32};
// (a + a + a) / 3 is not a.
const RightOptions kNearly{.over = Over::kFp32, .tolerance = 1e-5};

const int kNoSync = is_right(
    kGroup, "accumulates under no_sync()",
    [](auto& run) {
      return trained_by<SGD, Mlp>(run, SGDOptions(0.1), 3, [&](auto& model, int step) {
        {
          const auto guard = run.no_sync(model);
          backward_of_step(run, model, 10 + step);
        }
        backward_of_step(run, model, step);
      });
    },
    kNearly);

const int kZeroesBesideAMean = is_right(
    kGroup, "zeroes p.grad() in place where a mean and a no_sync() backward are in it",
    [](auto& run) {
      return trained_by<SGD, Mlp>(run, SGDOptions(0.1), 3, [&](auto& model, int step) {
        backward_of_step(run, model, 20 + step);
        {
          const auto guard = run.no_sync(model);
          backward_of_step(run, model, 10 + step);
        }
        for (const torch::Tensor& parameter : distinct(model.parameters())) {
          parameter.mutable_grad().zero_();
        }
        backward_of_step(run, model, step);
      });
    },
    kInFp32);

const int kTwice = is_right(
    kGroup, "runs two backwards before a step",
    [](auto& run) {
      return trained_by<SGD, Mlp>(run, SGDOptions(0.1), 3, [&](auto& model, int step) {
        backward_of_step(run, model, step);
        backward_of_step(run, model, 10 + step);
      });
    },
    kNearly);

const int kKeepsTheGuard = is_right(
    kGroup, "keeps the guard of no_sync() in a std::optional over several backwards",
    [](auto& run) {
      auto model = run.wrap(make<Mlp>());
      auto optimizer = run.template optimizer<SGD>(model, SGDOptions(0.1));
      std::optional<decltype(run.no_sync(model))> guard;
      for (int pass = 0; pass < 9; ++pass) {
        if (pass % 3 == 0) optimizer->zero_grad();
        if (pass % 3 == 0) guard = run.no_sync(model);
        if (pass % 3 == 2) guard.reset();
        backward_of_step(run, model, pass);
        if (pass % 3 == 2) optimizer->step();
      }
      return everything(run, model);
    },
    kNearly);

const int kRetains = is_right(
    kGroup, "runs backward twice over a graph that it retains",
    [](auto& run) {
      return trained_by<SGD, Mlp>(run, SGDOptions(0.1), 2, [&](auto& model, int step) {
        const torch::Tensor loss = loss_of_step(run, model, step);
        run.backward(loss, {}, /*keep_graph=*/true);
        run.backward(loss);
      });
    },
    kNearly);

const int kClipsByTorch = is_right(
    kGroup, "clips by torch::nn::utils::clip_grad_norm_",
    [](auto& run) {
      auto model = run.wrap(make<Mlp>());
      auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
      Values norms;
      for (int step = 0; step < 3; ++step) {
        optimizer->zero_grad();
        backward_of_step(run, model, step);
        norms.push_back(
            torch::tensor(torch::nn::utils::clip_grad_norm_(distinct(model.parameters()), 0.05)));
        optimizer->step();
      }
      Values all = run.values(model);
      all.insert(all.end(), norms.begin(), norms.end());
      return all;
    },
    {.over = Over::kFp32, .tolerance = 1e-6});

// change: between the last backward of an accumulation and its step; what it returns is compared, too.
template <typename Change>
int is_right_in_accumulation(const char* does, const Change& change) {
  return is_right(
      kGroup, does,
      [change](auto& run) {
        auto model = run.wrap(make<Mlp>());
        auto optimizer = run.template optimizer<SGD>(model, SGDOptions(0.1));
        Values seen;
        for (int step = 0; step < 3; ++step) {
          run.accumulate(
              model, *optimizer, 3,
              [&](int micro) { return loss_of_step(run, model, 10 * step + micro); },
              [&] {
                const torch::NoGradGuard no_grad;
                seen.push_back(torch::tensor(change(run, model)));
              });
        }
        Values all = everything(run, model);
        all.insert(all.end(), seen.begin(), seen.end());
        return all;
      },
      kNearly);
}

const int kAccumulatesAndClips = is_right_in_accumulation(
    "clips by torch::nn::utils::clip_grad_norm_ between an Accumulator's backward() and step()",
    [](auto&, auto& model) {
      return torch::nn::utils::clip_grad_norm_(distinct(model.parameters()), 0.05);
    });

const int kAccumulatesAndClipsByUs = is_right_in_accumulation(
    "clips by zeropage::clip_grad_norm_ between an Accumulator's backward() and step()",
    [](auto& run, auto& model) { return run.clip(model, 0.05); });

const int kAccumulatesAndBounds = is_right_in_accumulation(
    "reads, adds to, replaces and bounds p.grad() between an Accumulator's backward() and step()",
    [](auto&, auto& model) {
      const double norm = model->second->weight.grad().norm().template item<double>();
      model->first->bias.mutable_grad() = torch::full({40}, 0.01);
      model->last->weight.mutable_grad().add_(model->last->weight, 0.01);
      torch::nn::utils::clip_grad_value_(distinct(model.parameters()), 0.008);
      return norm;
    });

const int kAccumulatesAndReplaces = is_right_in_accumulation(
    "scales and replaces p.grad() between an Accumulator's backward() and step()",
    [](auto&, auto& model) {
      model->last->weight.mutable_grad().mul_(0.5);
      model->first->bias.mutable_grad() = torch::full({40}, 0.01);
      return 0.0;
    });

const int kZeroesBetweenMicroBatches =
    is_refused(kGroup, "zeroes gradients between the micro-batches of an Accumulator",
               "its gradient was zeroed or replaced between two micro-batches",
               "leave zero_grad() out; step() zeroes", [](auto& run) {
                 auto model = run.wrap(make<Mlp>());
                 auto optimizer = run.template optimizer<SGD>(model, SGDOptions(0.1));
                 Accumulator accumulator(model, {.micro_steps = 2});
                 accumulator.backward(loss_of_step(run, model, 0));
                 optimizer->zero_grad();
                 accumulator.backward(loss_of_step(run, model, 1));
               });

const int kGoesOnPastAMicroBatchThatThrew = is_refused(
    kGroup, "goes on with the next micro-batch after a hook threw in an Accumulator's backward()",
    "the micro-batch before ended by an exception",
    "call `accumulator.abandon()` on all ranks, and run the step again", [](auto& run) {
      auto model = run.wrap(make<Mlp>());
      Accumulator accumulator(model, {.micro_steps = 3});
      accumulator.backward(loss_of_step(run, model, 0));
      const Samples samples = samples_of(run.rank(), 7);
      const torch::Tensor outputs = model(samples.inputs);
      outputs.register_hook([](const torch::Tensor&) -> torch::Tensor {
        throw std::runtime_error("a hook of the script");
      });
      EXPECT_NE(error_of([&] { accumulator.backward(loss_against(outputs, samples.targets)); }),
                "");
      accumulator.backward(loss_of_step(run, model, 1));
    });

const int kClips = is_right(kGroup, "clips by zeropage::clip_grad_norm_",
                            [](auto& run) {
                              return trained_by<AdamW, Mlp>(run, AdamWOptions(0.01), 3,
                                                            [&](auto& model, int step) {
                                                              backward_of_step(run, model, step);
                                                              run.clip(model, 0.05);
                                                            });
                            },
                            {.over = Over::kFp32, .tolerance = 1e-5});

const int kReads = is_right(
    kGroup, "reads norms of p.grad() between backward and step",
    [](auto& run) {
      auto model = run.wrap(make<Mlp>());
      auto optimizer = run.template optimizer<SGD>(model, SGDOptions(0.1));
      Values all;
      for (int step = 0; step < 3; ++step) {
        optimizer->zero_grad();
        backward_of_step(run, model, step);
        const torch::NoGradGuard no_grad;
        for (const auto& parameter : model.parameters()) {
          all.push_back(parameter.grad().norm().clone());
          all.push_back(parameter.grad().isnan().any().clone());
        }
        optimizer->step();
      }
      for (const torch::Tensor& values : run.values(model)) all.push_back(values);
      return all;
    },
    kInFp32);

const int kScales = is_right(kGroup, "scales p.grad() in place", [](auto& run) {
  return trained_by<SGD, Mlp>(run, SGDOptions(0.1), 3, [&](auto& model, int step) {
    backward_of_step(run, model, step);
    const torch::NoGradGuard no_grad;
    for (const auto& parameter : model.parameters()) parameter.mutable_grad().mul_(0.5);
  });
});

const int kScalesBetween = is_right(
    kGroup, "scales p.grad() between two backwards that accumulate",
    [](auto& run) {
      return trained_by<SGD, Mlp>(run, SGDOptions(0.1), 3, [&](auto& model, int step) {
        backward_of_step(run, model, step);
        {
          const torch::NoGradGuard no_grad;
          for (const auto& parameter : model.parameters()) parameter.mutable_grad().mul_(-3);
        }
        backward_of_step(run, model, 10 + step);
      });
    },
    kNearly);

const int kReplaces = is_right(
    kGroup, "replaces p.grad() by another tensor",
    [](auto& run) {
      return trained_by<SGD, Mlp>(run, SGDOptions(0.1), 3, [&](auto& model, int step) {
        backward_of_step(run, model, step);
        const torch::NoGradGuard no_grad;
        for (const auto& parameter : model.parameters()) {
          parameter.mutable_grad() = parameter.grad().sign();
        }
      });
    },
    kInFp32);

// What ranks set by hand, other values on each, where the loss gives nothing: LibTorch's run gets their mean.
torch::Tensor by_hand(auto& run, const torch::Tensor& parameter, int step) {
  const auto of_rank = [&](int rank) {
    return torch::full(parameter.sizes(), 0.25 * (rank + 1) + step, torch::kFloat);
  };
  if constexpr (std::remove_cvref_t<decltype(run)>::kOurs) {
    return of_rank(run.rank()).to(parameter.scalar_type());
  }
  torch::Tensor sum = of_rank(0);
  for (int rank = 1; rank < run.ranks(); ++rank) sum += of_rank(rank);
  return sum / run.ranks();
}

template <typename Run, typename Model>
void backward_of_first(Run& run, Model& model, int step) {
  const Samples samples = samples_of(run.rank(), step);
  run.backward(
      run.forward([&] { return model->first(samples.inputs).to(torch::kFloat).square().mean(); }));
}

const int kByHandAlone = is_right(
    kGroup, "sets p.grad() by hand where no backward runs in the step",
    [](auto& run) {
      return trained_by<SGD, Mlp>(run, SGDOptions(0.1), 3, [&](auto& model, int step) {
        for (const auto& parameter : model->last->parameters()) {
          parameter.mutable_grad() = by_hand(run, parameter, step);
        }
      });
    },
    kNearly);

const int kByHandBefore = is_right(
    kGroup, "sets p.grad() by hand of a layer that the loss leaves out, before backward()",
    [](auto& run) {
      return trained_by<SGD, Mlp>(run, SGDOptions(0.1), 3, [&](auto& model, int step) {
        for (const auto& parameter : model->last->parameters()) {
          parameter.mutable_grad() = by_hand(run, parameter, step);
        }
        backward_of_first(run, model, step);
      });
    },
    kNearly);

const int kByHandAfter = is_right(
    kGroup, "sets p.grad() by hand of a layer that the loss leaves out, after backward()",
    [](auto& run) {
      return trained_by<SGD, Mlp>(run, SGDOptions(0.1), 3, [&](auto& model, int step) {
        backward_of_first(run, model, step);
        for (const auto& parameter : model->last->parameters()) {
          parameter.mutable_grad() = by_hand(run, parameter, step);
        }
      });
    },
    kNearly);

template <typename Run, typename Model>
void set_last_by_hand(Run& run, Model& model, int step, bool alike) {
  for (const auto& parameter : model->last->parameters()) {
    parameter.mutable_grad() =
        alike ? torch::full_like(parameter, 0.25 + step).detach() : by_hand(run, parameter, step);
  }
}

const int kByHandClipped = is_right(
    kGroup, "sets p.grad() by hand to the same values on all ranks, and clips by LibTorch",
    [](auto& run) {
      return trained_by<SGD, Mlp>(run, SGDOptions(0.1), 3, [&](auto& model, int step) {
        backward_of_first(run, model, step);
        set_last_by_hand(run, model, step, /*alike=*/true);
        torch::nn::utils::clip_grad_norm_(distinct(model.parameters()), 0.05);
      });
    },
    kNearly);

const int kByHandClippedByUs = is_right(
    kGroup,
    "sets p.grad() by hand, other values on each rank, and clips by zeropage::clip_grad_norm_",
    [](auto& run) {
      return trained_by<SGD, Mlp>(run, SGDOptions(0.1), 3, [&](auto& model, int step) {
        backward_of_first(run, model, step);
        set_last_by_hand(run, model, step, /*alike=*/false);
        run.clip(model, 0.05);
      });
    },
    kNearly);

const int kByHandClippedApart =
    is_refused(kGroup, "sets p.grad() by hand, other values on each rank, and clips by LibTorch",
               "is each rank's own, set by hand", "clip by `zeropage::clip_grad_norm_`",
               [](auto& run) {
                 auto model = run.wrap(make<Mlp>());
                 backward_of_first(run, model, 0);
                 set_last_by_hand(run, model, 0, /*alike=*/false);
                 torch::nn::utils::clip_grad_norm_(distinct(model.parameters()), 0.05);
               },
               {.stages = {1, 2, 3}});

const int kZeroesSome = is_right(kGroup, "zeroes the gradients of some parameters", [](auto& run) {
  return trained_by<AdamW, Mlp>(run, AdamWOptions(0.01), 3, [&](auto& model, int step) {
    backward_of_step(run, model, step);
    const torch::NoGradGuard no_grad;
    for (const auto& parameter : model->second->parameters()) parameter.mutable_grad().zero_();
  });
});

const int kDropsSome = is_right(kGroup, "drops the gradients of some parameters", [](auto& run) {
  return trained_by<AdamW, Mlp>(run, AdamWOptions(0.01), 3, [&](auto& model, int step) {
    backward_of_step(run, model, step);
    for (const auto& parameter : model->second->parameters()) parameter.mutable_grad().reset();
  });
});

const int kNotScalar =
    is_right(kGroup, "runs backward of a tensor with a gradient for it", [](auto& run) {
      return trained_by<SGD, Mlp>(run, SGDOptions(0.1), 3, [&](auto& model, int step) {
        const Samples samples = samples_of(run.rank(), step);
        const torch::Tensor outputs =
            run.forward([&] { return model(samples.inputs).to(torch::kFloat); });
        run.backward(outputs, samples.targets * 0.01);
      });
    });

const int kPenalty = is_right(
    kGroup, "adds a penalty on a gradient that autograd::grad gives",
    [](auto& run) {
      return trained_by<SGD, Mlp>(run, SGDOptions(0.1), 3, [&](auto& model, int step) {
        const Samples samples = samples_of(run.rank(), step);
        const torch::Tensor inputs = samples.inputs.clone().requires_grad_();
        const torch::Tensor outputs = model(inputs);
        const torch::Tensor gradient =
            torch::autograd::grad({outputs.sum()}, {inputs}, {}, true, /*create_graph=*/true)[0];
        run.backward(loss_against(outputs, samples.targets) + gradient.pow(2).mean());
      });
    },
    kInFp32);

const int kHookOfTensor = is_right(kGroup, "has a hook on an activation", [](auto& run) {
  return trained_by<SGD, Mlp>(run, SGDOptions(0.1), 3, [&](auto& model, int step) {
    const Samples samples = samples_of(run.rank(), step);
    const torch::Tensor outputs =
        run.forward([&] { return model(samples.inputs).to(torch::kFloat); });
    outputs.register_hook(
        [](const torch::Tensor& gradient) { return gradient.clamp(-0.01, 0.01); });
    run.backward(loss_against(outputs, samples.targets));
  });
});

const int kHookOfParameter = is_right(kGroup, "has a hook on a parameter", [](auto& run) {
  auto model = run.wrap(make<Mlp>());
  auto optimizer = run.template optimizer<SGD>(model, SGDOptions(0.1));
  for (const torch::Tensor& parameter : model.parameters()) {
    parameter.register_hook([](const torch::Tensor& gradient) { return gradient * 0.5; });
  }
  train_steps(run, model, *optimizer);
  return run.values(model);
});

const int kThrowingHook = is_right(
    kGroup, "goes on after a hook threw in backward",
    [](auto& run) {
      auto model = run.wrap(make<Mlp>());
      auto optimizer = run.template optimizer<SGD>(model, SGDOptions(0.1));
      train_steps(run, model, *optimizer, 2);
      const Samples samples = samples_of(run.rank(), 7);
      const torch::Tensor outputs = model(samples.inputs);
      outputs.register_hook([](const torch::Tensor&) -> torch::Tensor {
        throw std::runtime_error("a hook of the script");
      });
      EXPECT_NE(error_of([&] { loss_against(outputs, samples.targets).backward(); }), "");
      train_steps(run, model, *optimizer, 2, 2);
      return run.values(model);
    },
    kInFp32);

const int kUnused = is_right(kGroup, "leaves a layer out of the loss in some steps", [](auto& run) {
  return trained_by<AdamW, Mlp>(run, AdamWOptions(0.01), 4, [&](auto& model, int step) {
    const Samples samples = samples_of(run.rank(), step);
    const torch::Tensor loss = run.forward([&] {
      const torch::Tensor hidden =
          torch::tanh(model->first(samples.inputs.to(model->first->weight.scalar_type())));
      const torch::Tensor outputs =
          step % 2 == 0 ? model->last(hidden) : model->last(model->second(hidden));
      return loss_against(outputs, samples.targets);
    });
    run.backward(loss);
  });
});

const int kDetaches = is_right(kGroup, "detaches a branch", [](auto& run) {
  return trained_by<AdamW, Mlp>(run, AdamWOptions(0.01), 3, [&](auto& model, int step) {
    const Samples samples = samples_of(run.rank(), step);
    run.backward(run.forward([&] {
      const torch::Tensor outputs = model(samples.inputs);
      return loss_against(outputs + model(samples.inputs).detach(), samples.targets);
    }));
  });
});

const int kReadsAlone = is_refused(kGroup, "reads p.grad() on rank 0 alone at stages 1 to 3",
                                   "zeropage::GatheredGradients", "read it on all ranks",
                                   [](auto& run) {
                                     auto model = run.wrap(make<Mlp>());
                                     auto optimizer =
                                         run.template optimizer<SGD>(model, SGDOptions(0.1));
                                     backward_of_step(run, model, 0);
                                     if (run.rank() == 0) model->first->weight.grad().norm();
                                     optimizer->step();
                                   },
                                   {.stages = {1, 2, 3}});

}  // namespace
}  // namespace zeropage::habits_of_gradients
