// What operators do with a parameter that tensor_parallel() cut: what they would do with the whole one, or they throw.
#include "parallel/slice_mark.h"

#include <optional>
#include <sstream>
#include <string_view>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "tests/parallel/tensor_modules.h"
#include "zeropage/tensor_parallel.h"
#include "zeropage/zeropage.h"

namespace zeropage::slice_mark_test {
namespace {

using namespace zeropage::tensor_modules;
using namespace zeropage::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;

Plain cut_plain(const World& world) {
  Plain module = make_plain();
  tensor_parallel(module, world, plan());
  return module;
}

Tensor rows_of(int64_t width) {
  return torch::linspace(-1, 1, 5 * width, torch::kDouble).view({5, width});
}

// The module's forward is that of the whole one, by its layers on rows.
Tensor mlp_of(Plain& module, const Tensor& x) {
  return module->down(torch::gelu(module->up(x)));
}

double distance(const Tensor& a, const Tensor& b) {
  return (a - b).abs().max().item<double>();
}

void expect_slices(const Plain& whole, const Plain& cut, const World& world,
                   double tolerance = 1e-12) {
  const auto parameters = cut->named_parameters();
  for (const auto& item : whole->named_parameters()) {
    const Tensor expected = slice_of(item.key(), item.value().detach(), world, false);
    EXPECT_LE(distance(expected, own_slice(parameters[item.key()])), tolerance) << item.key();
    EXPECT_LE(distance(item.value().detach(), whole_of(parameters[item.key()])), tolerance)
        << item.key();
  }
}

// ---- what does the same to each element ----

using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<Tensor>&)>;

void train(Plain& module, const MakeOptimizer& make) {
  const auto optimizer = make(module->parameters());
  for (int step = 0; step < 3; ++step) {
    optimizer->zero_grad();
    whole_loss(module->logits(module(ids_of(step))), targets_of(step)).backward();
    optimizer->step();
  }
}

TEST(SliceMarkTest, OptimizersOfLibTorchUpdateSlicesAsTheyWouldTheWhole) {
  using namespace torch::optim;
  const std::vector<std::pair<const char*, MakeOptimizer>> optimizers = {
      {"SGD",
       [](const auto& of) {
         return std::make_unique<SGD>(of, SGDOptions(0.1).momentum(0.9).weight_decay(0.1));
       }},
      {"Adam",
       [](const auto& of) {
         return std::make_unique<Adam>(of, AdamOptions(0.01).weight_decay(0.1).amsgrad(true));
       }},
      {"AdamW", [](const auto& of) { return std::make_unique<AdamW>(of, AdamWOptions(0.01)); }},
      {"RMSprop",
       [](const auto& of) {
         return std::make_unique<RMSprop>(of,
                                          RMSpropOptions(0.01).weight_decay(0.1).centered(true));
       }},
      {"Adagrad", [](const auto& of) {
         return std::make_unique<Adagrad>(of, AdagradOptions(0.01).weight_decay(0.1));
       }}};
  for (const auto& [name, make] : optimizers) {
    SCOPED_TRACE(name);
    Plain whole = make_plain();
    train(whole, make);
    run_ranks(2, [&, make = make](World& world) {
      Plain cut = cut_plain(world);
      train(cut, make);
      // Adam's steps make small gradients large, and what sums over ranks lose with them.
      expect_slices(whole, cut, world, 1e-9);
    });
  }
}

TEST(SliceMarkTest, ACopyOfASliceIsASlice) {
  Plain whole = make_plain();
  const Tensor x = rows_of(kWidth);
  run_ranks(2, [&](World& world) {
    Plain cut = cut_plain(world);
    const torch::NoGradGuard no_grad;
    const auto half = [](const Tensor& weight) {
      return torch::where(weight.detach().clone() > 0, weight.mul(0.5), weight);
    };
    const auto by_hand = [&](Plain& module) {
      const Tensor hidden = torch::linear(x, half(module->up->weight), module->up->bias);
      return torch::linear(hidden, half(module->down->weight).to(torch::kFloat).to(torch::kDouble),
                           module->down->bias);
    };
    EXPECT_LE(distance(by_hand(whole), by_hand(cut)), 1e-7);
    auto copy = std::dynamic_pointer_cast<torch::nn::LinearImpl>(cut->down->clone());
    const Tensor hidden = cut->up(x);
    EXPECT_LE(distance(whole->down(whole->up(x)), copy->forward(hidden)), 1e-12);
    const std::vector<Tensor> lists = torch::_foreach_mul(
        std::vector<Tensor>{cut->up->weight, cut->down->weight}, torch::Scalar(2));
    EXPECT_LE(distance(2 * whole->down->weight, whole_of(lists[1])), 1e-12);
  });
}

TEST(SliceMarkTest, InferenceModeIsAsWithoutGradients) {
  Plain whole = make_plain();
  const Tensor x = rows_of(kWidth);
  run_ranks(2, [&](World& world) {
    Plain cut = cut_plain(world);
    const c10::InferenceMode inference;
    EXPECT_LE(distance(mlp_of(whole, x), mlp_of(cut, x)), 1e-12);
    const Tensor half = cut->up->weight * 0.5;
    EXPECT_LE(distance(whole->up->weight * 0.5, whole_of(half)), 1e-12);
    EXPECT_EQ(whole->up->weight.norm().item<double>(), cut->up->weight.norm().item<double>());
    EXPECT_THAT(error_of([&] {
                  torch::einsum("bi,oi->bo", {x, half});
                }),
                HasSubstr("got aten::einsum"));
  });
}

TEST(SliceMarkTest, AnAverageOfTheScriptsOwnIsOfSlices) {
  Plain whole = make_plain();
  const auto averaged = [](Plain& module) {
    const torch::NoGradGuard no_grad;
    std::vector<Tensor> kept, averages;
    for (const Tensor& parameter : module->parameters()) {
      kept.push_back(parameter.detach().clone());
      averages.push_back(parameter.detach().clone());
    }
    for (Tensor& parameter : module->parameters()) parameter.mul_(3);
    for (size_t index = 0; index < averages.size(); ++index) {
      averages[index].lerp_(module->parameters()[index], 0.5);
      module->parameters()[index].copy_(averages[index]);
    }
  };
  averaged(whole);
  run_ranks(2, [&](World& world) {
    Plain cut = cut_plain(world);
    averaged(cut);
    expect_slices(whole, cut, world);
  });
}

// ---- figures of all elements, and random numbers ----

TEST(SliceMarkTest, NormsSumsAndComparisonsAreThoseOfTheWhole) {
  Plain whole = make_plain();
  run_ranks(2, [&](World& world) {
    Plain cut = cut_plain(world);
    const torch::NoGradGuard no_grad;
    const auto figures = [](Plain& module) {
      std::vector<double> all;
      for (const Tensor& parameter : module->parameters()) {
        all.push_back(parameter.norm().item<double>());
        all.push_back(parameter.abs().max().item<double>());
        all.push_back(parameter.square().mean().item<double>());
        all.push_back(parameter.isfinite().all().item<bool>() ? 1 : 0);
        all.push_back(parameter.sum(0).square().sum().item<double>());
        all.push_back(parameter.equal(parameter.detach().clone()) ? 1 : 0);
      }
      for (const Tensor& norm : torch::_foreach_norm(module->parameters())) {
        all.push_back(norm.item<double>());
      }
      return all;
    };
    EXPECT_EQ(figures(whole), figures(cut));
    EXPECT_TRUE(whole->qkv->weight.equal(cut->qkv->weight));
  });
}

TEST(SliceMarkTest, RandomNumbersOfItsSizesAreSlicesOfThoseOfTheWhole) {
  Plain whole = make_plain();
  run_ranks(2, [&](World& world) {
    Plain cut = cut_plain(world);
    const auto drawn = [](const Tensor& like) {
      auto generator = at::detail::createCPUGenerator(3);
      const Tensor first = torch::randn_like(like, generator);
      return std::pair(first, torch::rand({3}, generator));
    };
    const auto [expected, after] = drawn(whole->qkv->weight.detach());
    const auto [actual, actual_after] = drawn(cut->qkv->weight);
    EXPECT_TRUE(own_slice(actual).equal(slice_of("qkv.weight", expected, world, false)));
    EXPECT_TRUE(actual_after.equal(after));
  });
}

// ---- values from outside ----

TEST(SliceMarkTest, WholeValuesThatAreCopiedOrLoadedAreCut) {
  Plain other = make_plain();
  {
    const torch::NoGradGuard no_grad;
    for (Tensor& parameter : other->parameters()) parameter.add_(1);
  }
  std::stringstream file;
  torch::save(other, file);
  const std::string bytes = file.str();
  run_ranks(2, [&](World& world) {
    Plain loaded = cut_plain(world);
    std::istringstream in(bytes);
    torch::load(loaded, in);
    expect_slices(other, loaded, world);
    EXPECT_LE(
        distance(mlp_of(other, rows_of(kWidth)).detach(), mlp_of(loaded, rows_of(kWidth)).detach()),
        1e-12);
    Plain copied = cut_plain(world);
    const torch::NoGradGuard no_grad;
    const auto from = other->named_parameters();
    for (auto& item : copied->named_parameters()) item.value().copy_(from[item.key()]);
    expect_slices(other, copied, world);
    EXPECT_THAT(
        error_of([&] {
          copied->up->weight.set_(torch::zeros({4, 4}, torch::kDouble));
        }),
        AllOf(HasSubstr("the weight of \"up\""), HasSubstr("expected values of sizes [31, 12]")));
  });
}

// ---- what is refused ----

struct ByHand : torch::autograd::Function<ByHand> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                        const Tensor& weight) {
    context->save_for_backward({x, weight});
    return torch::linear(x, weight);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0].mm(saved[1]), gradients[0].t().mm(saved[0])};
  }
};

TEST(SliceMarkTest, OperatorsThatWouldTakeASliceForTheWholeThrowWithoutGradientsToo) {
  run_ranks(2, [](World& world) {
    Plain cut = cut_plain(world);
    const Tensor x = rows_of(kWidth);
    const Tensor weight = cut->up->weight, bias = cut->up->bias;
    Tensor gradient_of_x = x.detach().clone().requires_grad_();
    EXPECT_THAT(error_of([&] { ByHand::apply(gradient_of_x, weight).sum().backward(); }),
                AllOf(HasSubstr("the weight of \"up\", which tensor_parallel() cut"),
                      HasSubstr("got aten::mm")));
    EXPECT_THAT(error_of([&] { bias.square().sum(); }),
                AllOf(HasSubstr("the bias of \"up\""), HasSubstr("got aten::square")));
    const torch::NoGradGuard no_grad;
    const auto refused = [](const char* name) {
      return AllOf(HasSubstr(c10::str("got aten::", name, ",")),
                   HasSubstr("would see this rank's slice alone"),
                   HasSubstr("whole_of(parameter)"));
    };
    EXPECT_THAT(error_of([&] { torch::einsum("bi,oi->bo", {x, weight}); }), refused("einsum"));
    EXPECT_THAT(error_of([&] {
                  torch::einsum("bi,oi->bo", {x, weight.detach().clone()});
                }),
                refused("einsum"));
    EXPECT_THAT(error_of([&] { torch::mm(x, weight.t()); }), refused("mm"));
    EXPECT_THAT(error_of([&] { torch::bmm(x.unsqueeze(0), weight.t().unsqueeze(0)); }),
                refused("unsqueeze"));
    EXPECT_THAT(error_of([&] { (x.unsqueeze(1) * weight).sum(-1); }),
                HasSubstr(c10::str("that gives [5, ", weight.size(0), ", 12]")));
    EXPECT_THAT(error_of([&] { cut->tokens->weight[5]; }), refused("select"));
    EXPECT_THAT(error_of([&] { torch::cat({weight.view({-1}), bias}); }), refused("view"));
    EXPECT_THAT(error_of([&] { bias.view({-1}); }), refused("view"));
    EXPECT_THAT(error_of([&] { bias[0].item<double>(); }), refused("select"));
    EXPECT_THAT(error_of([&] { torch::cat({bias, bias}); }), refused("cat"));
    EXPECT_THAT(error_of([&] { torch::outer(bias, bias); }), refused("outer"));
    EXPECT_THAT(error_of([&] { weight.equal(own_slice(weight)); }),
                HasSubstr("take zeropage::own_slice(parameter)"));
    EXPECT_EQ(own_slice(weight)[0].size(0), kWidth);
    EXPECT_EQ((bias + torch::zeros_like(bias) + bias.view({1, -1})).size(1), bias.size(0));
  });
}

TEST(SliceMarkTest, InitFunctionsAndOtherDrawsThrow) {
  run_ranks(2, [](World& world) {
    Plain cut = cut_plain(world);
    const auto refused = AllOf(HasSubstr("would draw for this rank's slice alone"),
                               HasSubstr("initialise the module before tensor_parallel()"));
    namespace init = torch::nn::init;
    const Tensor weight = cut->up->weight, bias = cut->up->bias;
    EXPECT_THAT(error_of([&] { init::normal_(weight, 0, 0.02); }), refused);
    EXPECT_THAT(error_of([&] { init::uniform_(bias); }), refused);
    EXPECT_THAT(error_of([&] { init::xavier_uniform_(weight); }), refused);
    EXPECT_THAT(error_of([&] { init::kaiming_normal_(weight); }), refused);
    EXPECT_THAT(error_of([&] { cut->up->reset_parameters(); }), refused);
    EXPECT_THAT(error_of([&] { init::orthogonal_(weight); }), HasSubstr("slice alone"));
    EXPECT_THAT(error_of([&] { init::eye_(weight); }), HasSubstr("slice alone"));
    EXPECT_THAT(error_of([&] { init::sparse_(weight, 0.5); }), HasSubstr("slice alone"));
    init::constant_(weight, 3);
    init::zeros_(bias);
    const torch::NoGradGuard no_grad;
    EXPECT_EQ(weight.sum().item<double>(), 3.0 * kHidden * kWidth);
    EXPECT_THAT(error_of([&] { torch::dropout(weight, 0.5, true); }), refused);
  });
}

TEST(SliceMarkTest, TorchSaveOfASliceThrowsAndNamesTheWayThatWorks) {
  run_ranks(2, [](World& world) {
    Plain cut = cut_plain(world);
    const auto saved = [](const auto& what) {
      return error_of([&] {
        std::ostringstream file;
        torch::save(what, file);
      });
    };
    const auto refused = AllOf(HasSubstr("which tensor_parallel() cut"),
                               HasSubstr("expected a whole tensor, got this rank's slice"),
                               HasSubstr("zeropage::save_weights()"));
    EXPECT_THAT(saved(cut), refused);
    EXPECT_THAT(saved(cut->up->weight), refused);
    EXPECT_THAT(saved(cut->up->bias.detach().clone()), refused);
    EXPECT_EQ(saved(cut->norm1), "");
    EXPECT_EQ(saved(own_slice(cut->up->weight)), "");
    EXPECT_EQ(saved(whole_of(cut->up->weight)), "");
  });
  run_ranks(1, [](World& world) {
    Plain cut = cut_plain(world);
    std::ostringstream file;
    torch::save(cut, file);
  });
}

TEST(SliceMarkTest, LbfgsWhichMixesParametersThrows) {
  run_ranks(2, [](World& world) {
    Plain cut = cut_plain(world);
    torch::optim::LBFGS optimizer(cut->parameters(), torch::optim::LBFGSOptions(0.1));
    EXPECT_THAT(error_of([&] {
                  optimizer.step([&] {
                    optimizer.zero_grad();
                    const Tensor loss = mlp_of(cut, rows_of(kWidth)).square().mean();
                    loss.backward();
                    return loss;
                  });
                }),
                HasSubstr("got aten::view, "));
  });
}

// ---- whole parameters between a column and its row ----

constexpr int64_t kOfNorm = 8;

struct WithNormImpl : torch::nn::Module {
  WithNormImpl() {
    up = register_module("up", torch::nn::Linear(6, 4 * kOfNorm));
    gate = register_module("gate", torch::nn::Linear(6, kOfNorm));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kOfNorm})));
    down = register_module("down", torch::nn::Linear(4 * kOfNorm, 6));
    to(torch::kDouble);
  }
  Tensor forward(const Tensor& x) {
    const Tensor parts = norm(up(x).view({x.size(0), -1, kOfNorm}));
    return down((parts * gate(x).unsqueeze(1)).flatten(1));
  }
  torch::nn::Linear up{nullptr}, gate{nullptr}, down{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(WithNorm);

WithNorm make_with_norm() {
  WithNorm module;
  const torch::NoGradGuard no_grad;
  for (Tensor& parameter : module->parameters()) {
    parameter.copy_(
        torch::linspace(-1, 2, parameter.numel(), torch::kDouble).sin().view(parameter.sizes()));
  }
  return module;
}

WithNorm cut_with_norm(const World& world) {
  WithNorm module = make_with_norm();
  tensor_parallel(module, world,
                  {{"up", Cut::column().unit(kOfNorm)},
                   {"gate", Cut::between()},
                   {"norm", Cut::between()},
                   {"down", Cut::row().unit(kOfNorm)}});
  return module;
}

TEST(BetweenMarkTest, GradientsOfLayersAndOfTheirInputsAreThoseOfTheWholeModule) {
  WithNorm whole = make_with_norm();
  Tensor input = rows_of(6).requires_grad_();
  whole(input).square().sum().backward();
  const auto expected = whole->named_parameters();
  run_ranks(2, [&](World& world) {
    checkpointing::Recompute recompute(RecomputeOptions::selective());
    for (const char* way : {"plainly", "in a region", "recomputed"}) {
      SCOPED_TRACE(way);
      WithNorm cut = cut_with_norm(world);
      Tensor x = rows_of(6).requires_grad_();
      std::optional<ActivationScope> scope;
      if (std::string_view(way) == "recomputed") scope.emplace(recompute);
      const Tensor output = std::string_view(way) == "in a region"
                                ? checkpoint([&](const Tensor& rows) { return cut(rows); }, x)
                                : cut(x);
      scope.reset();
      output.square().sum().backward();
      EXPECT_LE(distance(input.grad(), x.grad()), 1e-8);
      const auto parameters = cut->named_parameters();
      for (const char* name :
           {"gate.weight", "gate.bias", "norm.weight", "norm.bias", "down.bias"}) {
        EXPECT_LE(distance(expected[name].grad(), parameters[name].grad()), 1e-8) << name;
      }
    }
  });
}

TEST(BetweenMarkTest, ALayerWithANumberForEachFeatureThrows) {
  using namespace torch::nn;
  run_ranks(2, [](World& world) {
    const auto error = [&](const AnyModule& between) {
      Sequential net(Linear(4, 8));
      net->push_back(between);
      net->push_back(Linear(8, 4));
      tensor_parallel(net, world, {{"0", Cut::column()}, {"1", Cut::between()}, {"2", Cut::row()}});
      const std::string trained = error_of([&] { net->forward(torch::ones({3, 4})); });
      const torch::NoGradGuard no_grad;
      EXPECT_EQ(trained, error_of([&] { net->forward(torch::ones({3, 4})); }));
      return trained;
    };
    const auto words = [](const char* name) {
      return AllOf(HasSubstr("\"1.weight\", which the plan of tensor_parallel() has between"),
                   HasSubstr(c10::str("expected an input of 8 features, as it has a number for "
                                      "each, got this rank's 4 to aten::",
                                      name)),
                   HasSubstr("use it before the column or behind the row"));
    };
    EXPECT_THAT(error(AnyModule(PReLU(PReLUOptions().num_parameters(8)))), words("prelu"));
    EXPECT_THAT(error(AnyModule(GroupNorm(GroupNormOptions(2, 8)))), words("group_norm"));
    EXPECT_THAT(error(AnyModule(LayerNorm(LayerNormOptions({8})))), words("layer_norm"));
    EXPECT_THAT(error(AnyModule(BatchNorm1d(8))), words("batch_norm"));
    EXPECT_EQ(error(AnyModule(PReLU())), "");
  });
}

TEST(BetweenMarkTest, AUseOnWhatIsWholeThrows) {
  run_ranks(2, [](World& world) {
    WithNorm cut = cut_with_norm(world);
    const Tensor x = rows_of(6);
    EXPECT_THAT(
        error_of([&] { (cut(x).square().sum() + cut->norm->weight.square().sum()).backward(); }),
        AllOf(HasSubstr("\"norm.weight\""), HasSubstr("the gradient of aten::square"),
              HasSubstr("the sum is 2 times too large")));
    EXPECT_THAT(error_of([&] { torch::mm(x, cut->gate->weight.t()); }),
                AllOf(HasSubstr("\"gate\""), HasSubstr("expected a linear layer, got aten::mm")));
    const torch::NoGradGuard no_grad;
    EXPECT_EQ(torch::mm(x, cut->gate->weight.t()).size(1), kOfNorm);
    cut->norm->weight.normal_();
  });
}

}  // namespace
}  // namespace zeropage::slice_mark_test
