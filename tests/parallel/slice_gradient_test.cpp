// What operators do with the gradient of a parameter that tensor_parallel() cut: what they would do with the whole one,
// or they throw.
#include "parallel/slice_gradient.h"

#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "parallel/slice_mark.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "tests/parallel/tensor_modules.h"
#include "zeropage/tensor_parallel.h"
#include "zeropage/zeropage.h"

namespace zeropage::slice_gradient_test {
namespace {

using namespace zeropage::tensor_modules;
using namespace zeropage::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;
using memory::operator""_KiB;
using torch::Tensor;
using torch::optim::SGD;
using torch::optim::SGDOptions;

constexpr double kTolerance = 1e-12;

Plain cut_plain(const World& world) {
  Plain module = make_plain();
  tensor_parallel(module, world, plan());
  return module;
}

template <typename Model>
Tensor loss_of(Model& model, int seed) {
  return whole_loss(model->logits(model->forward(ids_of(seed))), targets_of(seed));
}

double distance(const Tensor& a, const Tensor& b) {
  return (a - b).abs().max().item<double>();
}

// Numbers of one gradient, as scripts log them.
std::vector<double> figures_of(const Tensor& gradient) {
  std::vector<double> figures = {
      gradient.norm().item<double>(),
      gradient.sum().item<double>(),
      gradient.abs().max().item<double>(),
      gradient.square().mean().item<double>(),
      gradient.mean(0).square().sum().item<double>(),
      gradient.isfinite().all().item<bool>() ? 1.0 : 0.0,
  };
  if (gradient.dim() > 1) figures.push_back(gradient.mean(1).square().sum().item<double>());
  return figures;
}

void expect_gradients(const Plain& whole, const Plain& cut, const World& world) {
  const auto parameters = cut->named_parameters();
  for (const auto& item : whole->named_parameters()) {
    SCOPED_TRACE(item.key());
    const Tensor expected = item.value().grad();
    const Tensor actual = parameters[item.key()].grad();
    const std::vector<double> of_whole = figures_of(expected), of_cut = figures_of(actual);
    for (size_t index = 0; index < of_whole.size(); ++index) {
      EXPECT_NEAR(of_whole[index], of_cut[index], kTolerance) << "figure " << index;
    }
    EXPECT_LE(distance(expected, whole_of(actual)), kTolerance);
    EXPECT_LE(distance(slice_of(item.key(), expected, world, false), own_slice(actual)),
              kTolerance);
  }
}

void expect_refusals(const Plain& cut) {
  const auto refused = [](const char* name) {
    return AllOf(HasSubstr("the gradient of the weight of \"up\", which tensor_parallel() cut"),
                 HasSubstr(c10::str("got aten::", name, ", which would see this rank's slice")),
                 HasSubstr("zeropage::whole_of(parameter.grad())"),
                 HasSubstr("zeropage::own_slice(parameter.grad())"),
                 HasSubstr("zeropage::gradient_norm(model)"));
  };
  const Tensor gradient = cut->up->weight.grad();
  EXPECT_THAT(error_of([&] { torch::mm(gradient, gradient.detach()); }), refused("mm"));
  EXPECT_THAT(error_of([&] { gradient.flatten(); }), refused("flatten"));
  EXPECT_THAT(error_of([&] { gradient[0]; }), refused("select"));
  EXPECT_THAT(error_of([&] {
                std::ostringstream file;
                torch::save(gradient, file);
              }),
              AllOf(HasSubstr("the gradient of the weight of \"up\""),
                    HasSubstr("expected a whole tensor, got this rank's slice")));
}

TEST(SliceGradientTest, FiguresAreThoseOfTheWholeGradientWithoutAWrapper) {
  Plain whole = make_plain();
  loss_of(whole, 1).backward();
  loss_of(whole, 2).backward();
  run_ranks(2, [&](World& world) {
    Plain cut = cut_plain(world);
    loss_of(cut, 1).backward();
    loss_of(cut, 2).backward();
    const torch::NoGradGuard no_grad;
    expect_gradients(whole, cut, world);
    expect_refusals(cut);
    // By the storage that is kept, and by that of a copy of the module.
    cut->zero_grad(/*set_to_none=*/false);
    EXPECT_EQ(cut->up->weight.grad().norm().item<double>(), 0);
    const torch::AutoGradMode on(true);
    auto copy = std::dynamic_pointer_cast<torch::nn::LinearImpl>(cut->up->clone());
    copy->forward(torch::ones({2, kWidth}, torch::kDouble)).sum().backward();
    EXPECT_NE(parallel::slice_mark_of(copy->weight.grad()), nullptr);
    EXPECT_NE(parallel::slice_mark_of(copy->bias.grad()), nullptr);
  });
}

TEST(SliceGradientTest, FiguresAreThoseOfTheWholeMeanAtEveryStage) {
  Plain whole = make_plain();
  for (const int seed : {1, 2, 3, 4}) (loss_of(whole, seed) / 2).backward();
  for (const int stage : {0, 1, 2, 3}) {
    SCOPED_TRACE(c10::str("stage ", stage));
    run_ranks(4, [&](World& all) {
      const Mesh mesh(all, {{"data", 2}, {"tensor", 2}});
      const World tensor = mesh["tensor"];
      Options options;
      options.stage = stage_of(stage);
      options.page_bytes = 4_KiB;
      Plain cut = cut_plain(tensor);
      DistributedDataParallel<Plain> model(cut, mesh, options);
      const int data = mesh["data"].rank();
      {
        const auto unsynced = model.no_sync();
        loss_of(cut, 1 + data).backward();
        EXPECT_NE(parallel::slice_mark_of(cut->up->weight.grad()), nullptr);
        EXPECT_NE(parallel::slice_mark_of(cut->up->bias.grad()), nullptr);
      }
      loss_of(cut, 3 + data).backward();
      const torch::NoGradGuard no_grad;
      expect_gradients(whole, cut, tensor);
      expect_refusals(cut);
      {
        const GatheredGradients gathered(model);
        expect_gradients(whole, cut, tensor);
      }
      for (Tensor& parameter : cut->parameters()) parameter.mutable_grad().mul_(2);
      EXPECT_NEAR(2 * whole->up->weight.grad().norm().item<double>(),
                  cut->up->weight.grad().norm().item<double>(), kTolerance);
      // A script's own tensor in its place.
      Tensor& gradient = cut->up->weight.mutable_grad();
      gradient = gradient.clone();
      Optimizer<SGD> optimizer(model, SGDOptions(1));
      const Tensor before = whole_of(cut->up->weight);
      optimizer.step();
      EXPECT_LE(distance(before - 2 * whole->up->weight.grad(), whole_of(cut->up->weight)),
                kTolerance);
    });
  }
}

TEST(SliceGradientTest, HooksAndAutogradGradSeeTheMark) {
  Plain whole = make_plain();
  loss_of(whole, 1).backward();
  run_ranks(2, [&](World& world) {
    Plain cut = cut_plain(world);
    const double expected = whole->up->weight.grad().norm().item<double>();
    double in_hook = 0;
    cut->up->weight.register_hook([&](const Tensor& gradient) {
      in_hook = gradient.norm().item<double>();
      return own_slice(gradient);
    });
    loss_of(cut, 1).backward();
    EXPECT_NEAR(expected, in_hook, kTolerance);
    EXPECT_NEAR(expected, cut->up->weight.grad().norm().item<double>(), kTolerance);
    cut->up->weight.register_hook([&](const Tensor& gradient) { return own_slice(gradient); });
    const auto gradients =
        torch::autograd::grad({loss_of(cut, 1)}, {cut->up->weight, cut->up->bias});
    EXPECT_NEAR(expected, gradients[0].norm().item<double>(), kTolerance);
    EXPECT_NEAR(whole->up->bias.grad().norm().item<double>(), gradients[1].norm().item<double>(),
                kTolerance);
  });
}

TEST(SliceGradientTest, AGradientThatAnotherTensorHasTooIsCopiedBeforeItIsMarked) {
  run_ranks(2, [](World& world) {
    Plain cut = cut_plain(world);
    // The sum hands the same gradient to both.
    Tensor other = torch::zeros(cut->up->bias.sizes(), torch::kDouble).requires_grad_();
    (cut->up->bias + other).square().sum().backward();
    EXPECT_NE(parallel::slice_mark_of(cut->up->bias.grad()), nullptr);
    EXPECT_EQ(parallel::slice_mark_of(other.grad()), nullptr);
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(other.grad().equal(own_slice(cut->up->bias.grad())));
    other.grad().zero_();
    EXPECT_NE(own_slice(cut->up->bias.grad()).abs().sum().item<double>(), 0);
  });
}

TEST(SliceGradientTest, ClipsOfLibTorchAreThoseOfTheWholeModule) {
  constexpr double kMost = 0.01;
  Plain whole = make_plain();
  loss_of(whole, 1).backward();
  const double expected = torch::nn::utils::clip_grad_norm_(whole->parameters(), kMost);
  torch::nn::utils::clip_grad_value_(whole->parameters(), 1e-3);
  run_ranks(2, [&](World& world) {
    Plain cut = cut_plain(world);
    loss_of(cut, 1).backward();
    EXPECT_NEAR(expected, torch::nn::utils::clip_grad_norm_(cut->parameters(), kMost), kTolerance);
    torch::nn::utils::clip_grad_value_(cut->parameters(), 1e-3);
    const torch::NoGradGuard no_grad;
    expect_gradients(whole, cut, world);
  });
}

TEST(SliceGradientTest, WholeOfAndOwnSliceOfNoGradientThrow) {
  run_ranks(2, [](World& world) {
    Plain cut = cut_plain(world);
    EXPECT_THAT(error_of([&] { whole_of(cut->up->weight.grad()); }),
                HasSubstr("whole_of: expected a tensor, got an undefined one"));
    EXPECT_THAT(error_of([&] { own_slice(cut->up->weight.grad()); }),
                HasSubstr("own_slice: expected a tensor, got an undefined one"));
  });
}

}  // namespace
}  // namespace zeropage::slice_gradient_test
