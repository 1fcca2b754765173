// What modules of scripts are like, and how they are called.
#include <atomic>
#include <map>
#include <stdexcept>

#include "tests/habits/scripts.h"
#include "tests/harness/errors.h"
#include "zeropage/experts.h"
#include "zeropage/plan.h"
#include "zeropage/tiled.h"
#include "zeropage/touch_all.h"

namespace zeropage::habits_of_modules {
namespace {

using namespace zeropage::testing;

constexpr const char* kGroup = "Modules and forward";
const RightOptions kInFp32{.over = Over::kFp32};

template <typename M, typename Run>
Values trained(Run& run) {
  auto model = run.wrap(make<M>());
  auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
  train_steps(run, model, *optimizer, 4);
  return everything(run, model);
}

const int kOddball =
    is_right(kGroup, "has tied, frozen, unused, scalar, empty and strided parameters",
             [](auto& run) { return trained<Oddball>(run); });
const int kConvolution = is_right(
    kGroup, "has convolutions and BatchNorm", [](auto& run) { return trained<ConvNet>(run); },
    kInFp32);
const int kLstm = is_right(
    kGroup, "has an LSTM", [](auto& run) { return trained<Recurrent>(run); }, kInFp32);
const int kAttention =
    is_right(kGroup, "has attention, and a head tied to the embedding", [](auto& run) {
      auto model = run.wrap(make<Transformer>());
      // Not Adam: where a gradient is noise (a bias of keys), so is its update.
      auto optimizer = run.template optimizer<SGD>(model, SGDOptions(0.1).momentum(0.9));
      train_steps(run, model, *optimizer, 4);
      return run.values(model);
    });

// ---- BatchNorm ----

struct NormedImpl : torch::nn::Module {
  NormedImpl() {
    first = register_module("first", torch::nn::Linear(7, 12));
    norm = register_module("norm", torch::nn::BatchNorm1d(12));
    last = register_module("last", torch::nn::Linear(12, 7));
  }
  torch::Tensor forward(const torch::Tensor& x) { return last(norm(first(x)).relu_()); }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Normed);

const int kInPlace = is_right(
    kGroup, "has an in-place ReLU behind BatchNorm", [](auto& run) { return trained<Normed>(run); },
    kInFp32);

const int kNormTwice = is_right(
    kGroup, "runs two training forwards with BatchNorm before one backward",
    [](auto& run) {
      return trained_by<SGD, Normed>(run, SGDOptions(0.1), 3, [&](auto& model, int step) {
        const torch::Tensor first = loss_of_step(run, model, step);
        const torch::Tensor second = loss_of_step(run, model, 10 + step);
        run.backward(first + second);
      });
    },
    kInFp32);

const int kArrow = is_right(
    kGroup, "calls model->forward(x), with BatchNorm",
    [](auto& run) {
      return trained_by<SGD, Normed>(run, SGDOptions(0.1), 3, [&](auto& model, int step) {
        const Samples samples = samples_of(run.rank(), step);
        run.backward(loss_against(model->forward(samples.inputs), samples.targets));
      });
    },
    kInFp32);

const int kRecomputesNorm = is_right(
    kGroup, "runs BatchNorm within a checkpointed region",
    [](auto& run) {
      return trained_by<SGD, Normed>(run, SGDOptions(0.1), 3, [&](auto& model, int step) {
        const Samples samples = samples_of(run.rank(), step);
        const auto forward = [&](const torch::Tensor& x) { return model(x); };
        torch::Tensor outputs;
        if constexpr (std::decay_t<decltype(run)>::kOurs) {
          outputs = checkpoint(forward, samples.inputs);
        } else {
          outputs = forward(samples.inputs);
        }
        run.backward(loss_against(outputs, samples.targets));
      });
    },
    kInFp32);

struct WithPositionsImpl : torch::nn::Module {
  WithPositionsImpl() {
    first = register_module("first", torch::nn::Linear(7, 7));
    last = register_module("last", torch::nn::Linear(7, 7));
    positions = register_buffer("positions", torch::arange(7).to(torch::kFloat));
  }
  torch::Tensor forward(const torch::Tensor& x) { return last(first(x) + positions); }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::Tensor positions;
};
TORCH_MODULE(WithPositions);

const int kPositions = is_refused(
    kGroup, "adds an fp32 buffer to activations under compute_dtype",
    "parameters and the floating-point inputs of forward() are BFloat16; buffers (\"positions\" "
    "Float) and tensors that forward() makes itself keep their own dtype",
    "write `x + positions.to(x.scalar_type())`",
    [](auto& run) { return trained<WithPositions>(run); }, {.mode = Mode::kBf16});

// x with a mask from a generator of the script's own, as a region or as it is.
template <typename Run, typename Model>
torch::Tensor masked_outputs(Run&, Model& model, const torch::Tensor& x, at::Generator generator) {
  const auto forward = [&model, generator](const torch::Tensor& x) {
    const torch::Tensor mask = torch::rand(x.sizes(), generator) > 0.5;
    return model(torch::tanh(x * mask) * mask);
  };
  if constexpr (Run::kOurs) {
    return checkpoint(forward, x);
  } else {
    return forward(x);
  }
}

const int kOwnGenerator = is_right(
    kGroup, "draws from a generator of its own within a checkpointed region", [](auto& run) {
      auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(7 + run.rank()));
      return trained_by<SGD, Mlp>(run, SGDOptions(0.1), 3, [&](auto& model, int step) {
        const Samples samples = samples_of(run.rank(), step);
        run.backward(run.forward([&] {
          return loss_against(masked_outputs(run, model, samples.inputs, generator),
                              samples.targets);
        }));
      });
    });

const int kEvaluates =
    is_right(kGroup, "evaluates between micro-steps, in eval mode and without gradients",
             [](auto& run) {
               auto model = run.wrap(make<Normed>());
               auto optimizer = run.template optimizer<SGD>(model, SGDOptions(0.1));
               Values all;
               for (int step = 0; step < 3; ++step) {
                 optimizer->zero_grad();
                 {
                   const auto guard = run.no_sync(model);
                   backward_of_step(run, model, 10 + step);
                 }
                 model.eval();
                 {
                   const torch::NoGradGuard no_grad;
                   const torch::Tensor outputs = model(samples_of(0, 99).inputs);
                   if (run.rank() == 0) all.push_back(outputs.clone());
                 }
                 model.train();
                 backward_of_step(run, model, step);
                 optimizer->step();
               }
               for (const torch::Tensor& values : everything(run, model)) all.push_back(values);
               return all;
             },
             {.over = Over::kFp32, .tolerance = 1e-5});

// ---- BatchNorm over the batches of all ranks ----

// LibTorch's run is given the batches of all ranks, of which the loss takes this rank's rows.
template <typename Run, typename Model>
torch::Tensor loss_over_ranks(Run& run, Model& model, int step) {
  const auto of_rank = [&](int rank) { return samples_of(rank, step, 2 + rank); };
  const Samples own = of_rank(run.rank());
  if constexpr (Run::kOurs) {
    return run.forward([&] { return loss_against(model(own.inputs), own.targets); });
  } else {
    Values inputs;
    int64_t first = 0;
    for (int rank = 0; rank < run.ranks(); ++rank) {
      inputs.push_back(of_rank(rank).inputs);
      if (rank < run.rank()) first += 2 + rank;
    }
    const torch::Tensor outputs = model(torch::cat(inputs));
    return loss_against(outputs.narrow(0, first, 2 + run.rank()), own.targets);
  }
}

template <typename Run>
Normed synchronised(Run& run) {
  Normed net = make<Normed>();
  if constexpr (Run::kOurs) sync_batch_norm(net, run.world());
  return net;
}

const RightOptions kOverRanks{.over = Over::kFp32, .tolerance = 1e-5};

const int kSynchronised = is_right(
    kGroup, "calls sync_batch_norm(), with batches of different sizes",
    [](auto& run) {
      auto model = run.wrap(synchronised(run));
      auto optimizer = run.template optimizer<SGD>(model, SGDOptions(0.1));
      for (int step = 0; step < 3; ++step) {
        optimizer->zero_grad();
        run.backward(loss_over_ranks(run, model, step));
        optimizer->step();
      }
      return everything(run, model);
    },
    kOverRanks);

const int kSynchronisedEvaluates = is_right(
    kGroup,
    "calls sync_batch_norm(), and evaluates between micro-steps with batches of different sizes",
    [](auto& run) {
      auto model = run.wrap(synchronised(run));
      auto optimizer = run.template optimizer<SGD>(model, SGDOptions(0.1));
      Values all;
      for (int step = 0; step < 3; ++step) {
        optimizer->zero_grad();
        {
          const auto guard = run.no_sync(model);
          run.backward(loss_over_ranks(run, model, 10 + step));
        }
        model.eval();
        {
          const torch::NoGradGuard no_grad;
          const torch::Tensor outputs = model(samples_of(0, 99, 1 + run.rank()).inputs);
          all.push_back(outputs.mean(0));
        }
        model.train();
        run.backward(loss_over_ranks(run, model, step));
        optimizer->step();
      }
      for (const torch::Tensor& values : everything(run, model)) all.push_back(values);
      return all;
    },
    kOverRanks);

const int kMovesMarked = is_refused(kGroup, "moves a module by ->to() after sync_batch_norm()",
                                    "would lose its mark", "move the module first",
                                    [](auto& run) {
                                      Normed net = make<Normed>();
                                      sync_batch_norm(net, run.world());
                                      net->to(torch::kDouble);
                                    },
                                    {.stages = {0}});

const int kSingleRow =
    is_refused(kGroup, "gives a BatchNorm1d a single row, after sync_batch_norm()",
               "Expected more than 1 value per channel",
               "write a `zeropage::parallel::SyncBatchNorm`, which counts the rows of all ranks",
               [](auto& run) {
                 Normed net = make<Normed>();
                 sync_batch_norm(net, run.world());
                 run.wrap(net)(torch::ones({1, 7}));
               });

const int kInference = is_right(kGroup, "evaluates in inference mode", [](auto& run) {
  auto model = run.wrap(make<Mlp>());
  auto optimizer = run.template optimizer<SGD>(model, SGDOptions(0.1));
  Values all;
  for (int step = 0; step < 3; ++step) {
    train_step(run, model, *optimizer, step);
    torch::Tensor outputs;
    {
      const c10::InferenceMode inference;
      outputs = model(samples_of(run.rank(), 99).inputs);
    }
    all.push_back(outputs.clone());
  }
  return all;
});

// ---- inputs and outputs ----

struct Heads {
  torch::Tensor wide;
  std::vector<torch::Tensor> narrow;
};

struct StructuredImpl : torch::nn::Module {
  StructuredImpl() {
    first = register_module("first", torch::nn::Linear(7, 12));
    last = register_module("last", torch::nn::Linear(12, 7));
  }
  Heads forward(const torch::Tensor& x) {
    const torch::Tensor hidden = torch::tanh(first(x));
    const torch::Tensor wide = last(hidden);
    return {wide, {hidden.narrow(1, 0, 3), hidden.narrow(1, 3, 2)}};
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
};
TORCH_MODULE(Structured);

struct DictionaryImpl : torch::nn::Module {
  DictionaryImpl() { last = register_module("last", torch::nn::Linear(7, 7)); }
  std::map<std::string, torch::Tensor> forward(const std::map<std::string, torch::Tensor>& named) {
    return {{"outputs", last(named.at("inputs"))}};
  }
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(Dictionary);

const int kStructs = is_right(kGroup, "returns structs and vectors from forward", [](auto& run) {
  return trained_by<SGD, Structured>(run, SGDOptions(0.1), 3, [&](auto& model, int step) {
    const Samples samples = samples_of(run.rank(), step);
    run.backward(run.forward([&] {
      const Heads heads = model(samples.inputs);
      return loss_against(heads.wide, samples.targets) +
             heads.narrow[0].to(torch::kFloat).sum() * 0.01 +
             heads.narrow[1].to(torch::kFloat).pow(2).sum() * 0.01;
    }));
  });
});

const int kDictionaries = is_right(
    kGroup, "takes and returns dictionaries",
    [](auto& run) {
      return trained_by<SGD, Dictionary>(run, SGDOptions(0.1), 3, [&](auto& model, int step) {
        const Samples samples = samples_of(run.rank(), step);
        const std::map<std::string, torch::Tensor> inputs = {{"inputs", samples.inputs}};
        run.backward(loss_against(model(inputs).at("outputs"), samples.targets));
      });
    },
    kInFp32);

const int kRagged = is_right(kGroup, "has last batches of other sizes on each rank", [](auto& run) {
  return trained_by<SGD, Mlp>(run, SGDOptions(0.1), 3, [&](auto& model, int step) {
    run.backward(loss_of_step(run, model, step, step == 2 ? 1 + run.rank() : 3));
  });
});

const int kSiamese = is_right(kGroup, "calls the model twice for one loss", [](auto& run) {
  return trained_by<AdamW, Mlp>(run, AdamWOptions(0.01), 3, [&](auto& model, int step) {
    run.backward(run.forward([&] {
      const torch::Tensor left = model(samples_of(run.rank(), step).inputs);
      const torch::Tensor right = model(samples_of(run.rank(), 10 + step).inputs);
      return (left - right).to(torch::kFloat).pow(2).mean();
    }));
  });
});

// ---- buffers ----

struct RotaryImpl : torch::nn::Module {
  RotaryImpl() {
    first = register_module("first", torch::nn::Linear(7, 8));
    last = register_module("last", torch::nn::Linear(8, 7));
    turns =
        register_buffer("turns", torch::polar(torch::ones({4}), torch::arange(4, torch::kFloat)));
    calls = register_buffer("calls", torch::zeros({1}, torch::kInt64));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    calls.add_(1);
    const torch::Tensor pairs = torch::view_as_complex(first(x).view({-1, 4, 2}).contiguous());
    return last(torch::view_as_real(pairs * turns).flatten(1));
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::Tensor turns, calls;
};
TORCH_MODULE(Rotary);

const int kBuffers = is_right(
    kGroup, "has complex and integer buffers, and counts its calls",
    [](auto& run) { return trained<Rotary>(run); }, kInFp32);

// ---- autograd ----

struct Doubled : torch::autograd::Function<Doubled> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x) {
    context->save_for_backward({x});
    return x * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0] * 2 + context->get_saved_variables()[0] * 0};
  }
};

const int kFunction = is_right(kGroup, "applies an autograd function of its own", [](auto& run) {
  return trained_by<SGD, Mlp>(run, SGDOptions(0.1), 3, [&](auto& model, int step) {
    const Samples samples = samples_of(run.rank(), step);
    run.backward(run.forward(
        [&] { return loss_against(Doubled::apply(model(samples.inputs)), samples.targets); }));
  });
});

const int kThrows = is_right(kGroup, "goes on after an exception in forward", [](auto& run) {
  auto model = run.wrap(make<Mlp>());
  auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
  for (int step = 0; step < 4; ++step) {
    if (step == 2) {
      EXPECT_NE(error_of([&] {
                  run.forward([&] {
                    return loss_against(model(torch::ones({2, 7})), torch::ones({5, 3}));
                  });
                }),
                "");
    }
    train_step(run, model, *optimizer, step);
  }
  return run.values(model);
});

const int kOldRegion = is_refused(
    kGroup, "runs backward over a checkpointed region from before step()",
    "was changed in place after the region", "run backward() before step()", [](auto& run) {
      auto model = run.wrap(make<Mlp>());
      auto optimizer = run.template optimizer<SGD>(model, SGDOptions(0.1));
      backward_of_step(run, model, 0);
      const Samples samples = samples_of(run.rank(), 1);
      const torch::Tensor outputs =
          checkpoint([&](const torch::Tensor& x) { return model(x); }, samples.inputs);
      optimizer->step();
      run.backward(loss_against(outputs, samples.targets));
    });

// ---- limits of memory ----

const int kTooSmall =
    is_refused(kGroup, "limits memory to less than the model holds from step to step",
               "of device memory a rank before any activation, ",
               "a setting of `zeropage::fit`, or more memory", [](auto& run) {
                 run.options.device_memory_bytes = 8192;
                 run.options.page_bytes = 4096;
                 auto model = run.wrap(make<Mlp>());
                 auto optimizer = run.template optimizer<torch::optim::Adam>(
                     model, torch::optim::AdamOptions(0.1));
               });

const int kOverBudget = is_refused(
    kGroup, "makes activations that pass a limit of memory",
    "would pass the limit of device memory: ",
    "what the error says makes the step fit: a smaller micro-batch first", [](auto& run) {
      run.options.device_memory_bytes = 1 << 20;
      auto model = run.wrap(make<Mlp>());
      model(torch::ones({1 << 16, 7}));
    });

// ---- several models ----

const int kGan = is_right(
    kGroup, "trains two models against each other, each with its optimizer",
    [](auto& run) {
      auto generator = run.wrap(make<Mlp>());
      auto critic = run.wrap(make<Structured>());
      auto of_generator = run.template optimizer<AdamW>(generator, AdamWOptions(0.01));
      auto of_critic = run.template optimizer<AdamW>(critic, AdamWOptions(0.01));
      const auto score = [&](const torch::Tensor& x) { return critic(x).wide.mean(); };
      for (int step = 0; step < 3; ++step) {
        const Samples samples = samples_of(run.rank(), step);
        of_critic->zero_grad();
        run.backward(score(generator(samples.inputs).detach()) - score(samples.targets));
        of_critic->step();
        for (torch::Tensor parameter : critic.parameters()) parameter.requires_grad_(false);
        of_generator->zero_grad();
        run.backward(-score(generator(samples.inputs)));
        of_generator->step();
        for (torch::Tensor parameter : critic.parameters()) parameter.requires_grad_(true);
      }
      Values all = run.values(generator);
      for (const torch::Tensor& values : run.values(critic)) all.push_back(values);
      return all;
    },
    kInFp32);

const int kEvaluatesAlone = is_right(
    kGroup, "evaluates on rank 0 alone at stages 0 to 2",
    [](auto& run) {
      auto model = run.wrap(make<Mlp>());
      auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
      for (int step = 0; step < 3; ++step) {
        train_step(run, model, *optimizer, step);
        if (run.setting().stage == 3 || run.rank() != 0) continue;
        model.eval();
        const torch::NoGradGuard no_grad;
        EXPECT_TRUE(model(samples_of(0, 99).inputs).isfinite().all().template item<bool>());
        model.train();
      }
      return run.values(model);
    },
    kInFp32);

struct Numbers : torch::data::datasets::Dataset<Numbers> {
  torch::data::Example<> get(size_t index) override {
    return {torch::full({7}, static_cast<float>(index) * 0.1F), torch::full({7}, 0.5F)};
  }
  torch::optional<size_t> size() const override { return 12; }
};

const int kLoader = is_right(kGroup, "reads batches from a DataLoader with workers", [](auto& run) {
  auto model = run.wrap(make<Mlp>());
  auto optimizer = run.template optimizer<SGD>(model, SGDOptions(0.1));
  auto loader = torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(
      Numbers().map(torch::data::transforms::Stack<>()),
      torch::data::DataLoaderOptions(3).workers(2).enforce_ordering(true));
  for (const auto& batch : *loader) {
    optimizer->zero_grad();
    run.backward(run.forward([&] { return loss_against(model(batch.data), batch.target); }));
    optimizer->step();
  }
  return run.values(model);
});

// ---- Experts ----

struct MixtureImpl : torch::nn::Module {
  MixtureImpl() {
    first = register_module("first", torch::nn::Linear(7, 8));
    experts = register_module("experts", parallel::Experts(parallel::ExpertsOptions(8, 12, 4, 2)));
    last = register_module("last", torch::nn::Linear(8, 7));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor y = first(x);
    return last(y + experts(y));
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  parallel::Experts experts{nullptr};
};
TORCH_MODULE(Mixture);

const int kMixture =
    is_right(kGroup, "has a mixture of experts, and each rank's tokens take others",
             [](auto& run) { return trained<Mixture>(run); });

// Each rank runs one of a list of experts, another one in each step.
struct ListedImpl : torch::nn::Module {
  ListedImpl() {
    for (int expert = 0; expert < 4; ++expert) experts->push_back(torch::nn::Linear(7, 7));
    register_module("experts", experts);
    last = register_module("last", torch::nn::Linear(7, 7));
  }
  torch::Tensor forward(const torch::Tensor& x, int64_t chosen, bool touches) {
    const auto run = [&](const torch::Tensor& x) {
      return torch::tanh(experts[static_cast<size_t>(chosen)]->as<torch::nn::Linear>()->forward(x));
    };
    return last(touches ? touch_all(experts, x, run) : run(x));
  }
  torch::nn::ModuleList experts;
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(Listed);

template <typename Run>
Values trained_experts(Run& run, bool touches) {
  return trained_by<SGD, Listed>(run, SGDOptions(0.1), 4, [&](auto& model, int step) {
    const Samples samples = samples_of(run.rank(), step);
    const int64_t chosen = (step + 3 * run.rank()) % 4;
    run.backward(loss_against(model(samples.inputs, chosen, touches), samples.targets));
  });
}

const int kTouches = is_right(
    kGroup, "runs other modules of a list on each rank, under touch_all()",
    [](auto& run) { return trained_experts(run, /*touches=*/true); }, kInFp32);
const int kDoesNotTouch =
    is_refused(kGroup, "runs other modules of a list on each rank at stage 3",
               "zeropage::touch_all()", "run them under `touch_all()`, or all of them on all ranks",
               [](auto& run) { trained_experts(run, /*touches=*/false); }, {.stages = {3}});

struct InTilesImpl : torch::nn::Module {
  InTilesImpl() {
    mlp = register_module("mlp", torch::nn::Sequential(torch::nn::Linear(7, 20), torch::nn::GELU(),
                                                       torch::nn::Linear(20, 7)));
    last = register_module("last", torch::nn::Linear(7, 7));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto run = [mlp = mlp.ptr()](const torch::Tensor& tile) { return mlp->forward(tile); };
    return last(x + tiled(*mlp, x, run, {.tokens = 2}));
  }
  torch::nn::Sequential mlp{nullptr};
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(InTiles);

const int kTiled = is_right(
    kGroup, "runs an MLP in tiles, by tiled()", [](auto& run) { return trained<InTiles>(run); },
    kInFp32);

// ---- Planning ----

// Constructing the module draws from the generator, and the plan's ledger is its own.
const int kPlans = is_right(
    kGroup, "plans with the module's class in the middle of a run",
    [](auto& run) {
      auto model = run.wrap(make<Mlp>());
      auto optimizer = run.template optimizer<SGD>(model, SGDOptions(0.1));
      train_step(run, model, *optimizer, 0);
      if (run.rank() == 0) {
        const Plan planned = plan([] { return Mlp(); }, torch::zeros({2, 7}), {.ranks = 64});
        EXPECT_NE(planned.choice(), nullptr);
      }
      train_step(run, model, *optimizer, 1);
      return everything(run, model);
    },
    kInFp32);

struct LookingImpl : torch::nn::Module {
  LookingImpl() { first = register_module("first", torch::nn::Linear(7, 7)); }
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor y = first(x);
    return y.sum().item<float>() > 0 ? y : -y;
  }
  torch::nn::Linear first{nullptr};
};
TORCH_MODULE(Looking);

const int kPlansValues =
    is_refused(kGroup, "plans a module whose forward reads values",
               "is to leave that out where tensor.is_meta()",
               "leave the decision out where `tensor.is_meta()`",
               [](auto&) {
                 plan([] { return Looking(); }, torch::zeros({2, 7}), {.ranks = 2});
               },
               {.stages = {0}});

}  // namespace
}  // namespace zeropage::habits_of_modules
