// Tensors that a script makes of a parameter that tensor_parallel() cut, and what it gives beside one: slices, or it
// throws.
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

namespace zeropage::slice_copies_test {
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

double distance(const Tensor& a, const Tensor& b) {
  return (a - b).abs().max().item<double>();
}

template <typename Value>
std::string error_of_saving(const Value& value) {
  return error_of([&] {
    std::ostringstream file;
    torch::save(value, file);
  });
}

const auto kNotSaved = AllOf(HasSubstr("the weight of \"down\", which tensor_parallel() cut"),
                             HasSubstr("expected a whole tensor, got this rank's slice"));

// Ways to fill a tensor of the script's from a slice.
using Fill = std::function<Tensor(const Tensor&)>;
std::vector<std::pair<const char*, Fill>> fills() {
  const auto empty = [](const Tensor& of) { return torch::empty(of.sizes(), torch::kDouble); };
  return {
      {"copy_ into empty_like", [](const Tensor& w) { return torch::empty_like(w).copy_(w); }},
      {"copy_ into sizes", [=](const Tensor& w) { return empty(w).copy_(w); }},
      {"add_ to zeros_like", [](const Tensor& w) { return torch::zeros_like(w).add_(w); }},
      {"add_ to new_zeros", [](const Tensor& w) { return w.new_zeros(w.sizes()).add_(w); }},
      {"lerp_", [=](const Tensor& w) { return empty(w).zero_().lerp_(w, 1.0); }},
      {"add_out",
       [](const Tensor& w) {
         Tensor out = torch::empty({0}, torch::kDouble);
         return torch::add_out(out, w, torch::zeros({}, torch::kDouble));
       }},
      {"add_out of sizes",
       [=](const Tensor& w) {
         Tensor out = empty(w);
         return torch::add_out(out, w, torch::zeros({}, torch::kDouble));
       }},
      {"_foreach_copy_",
       [=](const Tensor& w) {
         const std::vector<Tensor> to = {torch::zeros({2}), empty(w)};
         torch::_foreach_copy_(to, std::vector<Tensor>{torch::ones({2}), w});
         EXPECT_EQ(parallel::slice_mark_of(to[0]), nullptr);
         return to[1];
       }},
      {"_foreach_lerp_",
       [=](const Tensor& w) {
         const std::vector<Tensor> to = {empty(w).zero_()};
         torch::_foreach_lerp_(to, std::vector<Tensor>{w}, torch::Scalar(1.0));
         return to[0];
       }},
      {"where", [](const Tensor& w) { return torch::where(w > 100, torch::zeros_like(w), w); }},
      {"max_out",
       [=](const Tensor& w) {
         Tensor out = empty(w);
         return torch::max_out(out, w, torch::full_like(w, -100.0));
       }},
      {"full_like", [](const Tensor& w) { return torch::full_like(w, 0.0).add_(w); }},
  };
}

TEST(SliceCopiesTest, ATensorThatAScriptFillsFromASliceIsASlice) {
  Plain whole = make_plain();
  run_ranks(2, [&](World& world) {
    Plain cut = cut_plain(world);
    const torch::NoGradGuard no_grad;
    for (const auto& [name, fill] : fills()) {
      SCOPED_TRACE(name);
      const Tensor expected = whole->down->weight.detach();
      const Tensor filled = fill(cut->down->weight);
      ASSERT_NE(parallel::slice_mark_of(filled), nullptr);
      EXPECT_EQ(distance(expected, whole_of(filled)), 0);
      EXPECT_EQ(expected.norm().item<double>(), filled.norm().item<double>());
      EXPECT_THAT(error_of_saving(filled), kNotSaved);
      EXPECT_EQ(error_of_saving(own_slice(filled)), "");
      EXPECT_THAT(error_of([&] { filled.flatten(); }), HasSubstr("got aten::flatten"));
    }
    EXPECT_EQ(parallel::slice_mark_of(own_slice(cut->down->weight)), nullptr);
    Tensor into = torch::zeros_like(cut->down->weight);
    torch::max_out(into, cut->down->weight, torch::zeros_like(into));
    EXPECT_EQ(distance(whole->down->weight.detach().clamp_min(0), whole_of(into)), 0);
    EXPECT_THAT(error_of([&] { torch::sum_out(into, cut->down->weight, {0}); }),
                HasSubstr("expected a tensor that is no slice for what aten::sum writes"));
    auto drawn = torch::randn_like(cut->down->weight);
    EXPECT_THAT(error_of_saving(drawn), kNotSaved);
  });
}

TEST(SliceCopiesTest, ATensorLikeASliceIsASliceOfOneLikeTheWhole) {
  Plain whole = make_plain();
  const auto sums = [](const Tensor& weight) {
    return std::vector<double>{torch::ones_like(weight).sum().item<double>(),
                               torch::full_like(weight, 2).norm().item<double>(),
                               torch::zeros_like(weight).add(1).mean(0).sum().item<double>()};
  };
  run_ranks(2, [&](World& world) {
    Plain cut = cut_plain(world);
    EXPECT_EQ(sums(whole->down->weight), sums(cut->down->weight));
    EXPECT_EQ(sums(whole->up->bias.detach()), sums(cut->up->bias));
    EXPECT_THAT(error_of_saving(torch::zeros_like(cut->down->weight)), kNotSaved);
  });
}

TEST(SliceCopiesTest, ATensorThatCannotBecomeASliceIsRefused) {
  run_ranks(2, [](World& world) {
    Plain cut = cut_plain(world);
    const torch::NoGradGuard no_grad;
    const Tensor weight = cut->down->weight;
    const auto refused = [](const char* got) {
      return AllOf(HasSubstr("the weight of \"down\""), HasSubstr("got one that"), HasSubstr(got),
                   HasSubstr("zeropage::own_slice(parameter)"));
    };
    const Tensor flat = torch::zeros({weight.numel()}, torch::kDouble);
    EXPECT_THAT(error_of([&] { flat.view(weight.sizes()).copy_(weight); }),
                refused("shares its memory with another"));
    const Tensor kept = torch::zeros(weight.sizes(), torch::kDouble);
    EXPECT_THAT(error_of([&] { kept.detach().copy_(weight); }),
                refused("shares its memory with another"));
    torch::nn::Linear layer(weight.size(1), weight.size(0));
    EXPECT_THAT(error_of([&] { layer->weight.copy_(weight); }), refused("is a parameter"));
    layer->weight.copy_(own_slice(weight));
    EXPECT_THAT(
        error_of([&] {
          torch::zeros({kWidth, kHidden}).copy_(weight);
        }),
        AllOf(HasSubstr("to write to a tensor of this rank's [12, "),
              HasSubstr("got one of [12, 31]"), HasSubstr("zeropage::whole_of(parameter)")));
    // An activation of this rank's features is no slice.
    const Tensor rows = torch::zeros({5, cut->up->bias.size(0)}, torch::kDouble);
    rows.view({1, 5, -1}).add_(cut->up->bias);
    EXPECT_EQ(parallel::slice_mark_of(rows), nullptr);
    EXPECT_THAT(error_of([&] {
                  torch::zeros({5, kHidden}).add_(cut->up->bias);
                }),
                HasSubstr("got one of [5, 31]"));
  });
  run_ranks(1, [](World& world) {
    Plain cut = cut_plain(world);
    const torch::NoGradGuard no_grad;
    torch::zeros({kWidth, kHidden}, torch::kDouble).copy_(cut->down->weight);
  });
}

TEST(SliceCopiesTest, WhatIsGivenBesideASliceMayBeOfTheWhole) {
  Plain whole = make_plain();
  const auto change = [](Plain& module) {
    const torch::NoGradGuard no_grad;
    for (const Tensor& weight : {module->down->weight, module->up->weight, module->qkv->weight}) {
      weight.div_(weight.norm(2, /*dim=*/1, /*keepdim=*/true));
      weight.mul_(torch::rsqrt(weight.square().mean(0, /*keepdim=*/true) + 1));
      weight.copy_(torch::where(weight.abs() > weight.abs().mean(0), weight, weight * 0.5));
    }
    module->up->bias.copy_(torch::linspace(-1, 1, kHidden, torch::kDouble));
    module->up->bias.mul_(module->up->weight.sum(1));
    // A row that all rows become.
    module->tokens->weight.copy_(torch::linspace(-2, 2, kWidth, torch::kDouble));
    module->out->weight.copy_(torch::linspace(-3, 3, kWidth, torch::kDouble));
    torch::_foreach_mul_(
        std::vector<Tensor>{module->up->weight, module->down->weight},
        std::vector<Tensor>{torch::linspace(1, 2, kHidden, torch::kDouble).unsqueeze(1),
                            torch::linspace(2, 3, kHidden, torch::kDouble)});
  };
  change(whole);
  run_ranks(2, [&](World& world) {
    Plain cut = cut_plain(world);
    change(cut);
    const auto parameters = cut->named_parameters();
    for (const auto& item : whole->named_parameters()) {
      EXPECT_LE(distance(item.value().detach(), whole_of(parameters[item.key()])), 1e-12)
          << item.key();
    }
  });
}

TEST(SliceCopiesTest, WhatFitsNeitherTheSliceNorTheWholeIsRefused) {
  run_ranks(2, [](World& world) {
    Plain cut = cut_plain(world);
    EXPECT_THAT(
        error_of([&] { torch::zeros(cut->up->bias.sizes(), torch::kDouble).copy_(cut->up->bias); }),
        AllOf(HasSubstr("the bias of \"up\""), HasSubstr("got aten::copy_")));
    const torch::NoGradGuard no_grad;
    const auto refused = [](const char* name, const char* sizes) {
      return AllOf(HasSubstr("the weight of \"down\", which tensor_parallel() cut: expected a "
                             "tensor beside it that fits the whole one of [12, 31], or"),
                   HasSubstr(c10::str("got aten::", name, " with one of ", sizes)));
    };
    const Tensor weight = cut->down->weight;
    EXPECT_EQ(torch::ones({17}).to(weight).scalar_type(), torch::kDouble);
    EXPECT_EQ(torch::ones({17}).type_as(weight).scalar_type(), torch::kDouble);
    EXPECT_EQ(weight.to(torch::ones({17})).scalar_type(), torch::kFloat);
    EXPECT_THAT(error_of([&] { weight.copy_(torch::zeros({17}, torch::kDouble)); }),
                refused("copy_", "[17]"));
    EXPECT_THAT(error_of([&] {
                  weight.mul(torch::zeros({5, 31}, torch::kDouble));
                }),
                refused("mul", "[5, 31]"));
    EXPECT_THAT(error_of([&] {
                  torch::_foreach_add_(std::vector<Tensor>{weight},
                                       std::vector<Tensor>{torch::zeros({7, 1}, torch::kDouble)});
                }),
                refused("_foreach_add_", "[7, 1]"));
  });
}

TEST(SliceCopiesTest, SlicesOfListsThatAreCutAtOtherPlacesAreRefused) {
  run_ranks(2, [](World& world) {
    torch::nn::Sequential net(torch::nn::Linear(8, 8), torch::nn::Linear(8, 8));
    tensor_parallel(net, world, {{"0", Cut::column()}, {"1", Cut::row()}});
    const torch::NoGradGuard no_grad;
    const std::vector<Tensor> columns = {net[0]->as<torch::nn::Linear>()->weight};
    const std::vector<Tensor> rows = {net[1]->as<torch::nn::Linear>()->weight};
    EXPECT_THAT(error_of([&] { torch::_foreach_copy_(columns, rows); }),
                HasSubstr("expected tensors that are cut alike, got aten::_foreach_copy_"));
  });
}

template <typename Optimizer, typename Options>
void expect_states_are_not_saved(const World& world, const Options& options) {
  Plain cut = cut_plain(world);
  Optimizer optimizer(cut->parameters(), options);
  whole_loss(cut->logits(cut(ids_of(1))), targets_of(1)).backward();
  optimizer.step();
  EXPECT_THAT(error_of_saving(optimizer),
              AllOf(HasSubstr("which tensor_parallel() cut, or of a tensor that was made of it, as "
                              "an optimizer's states are: expected a whole tensor"),
                    HasSubstr("save_state()"), HasSubstr("with a zeropage::Optimizer")));
}

TEST(SliceCopiesTest, TorchSaveOfAnOptimizerOfLibTorchsThrows) {
  using namespace torch::optim;
  run_ranks(2, [](World& world) {
    expect_states_are_not_saved<AdamW>(world, AdamWOptions(0.01));
    expect_states_are_not_saved<Adam>(world, AdamOptions(0.01).amsgrad(true));
    expect_states_are_not_saved<SGD>(world, SGDOptions(0.01).momentum(0.9));
    expect_states_are_not_saved<RMSprop>(world, RMSpropOptions(0.01));
    expect_states_are_not_saved<Adagrad>(world, AdagradOptions(0.01));
  });
}

}  // namespace
}  // namespace zeropage::slice_copies_test
