// A backward in two halves against one backward: bits, matrix products, hooks, memory.
#include "accumulate/split_backward.h"

#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/torch.h>

#include "tests/harness/errors.h"
#include "tests/harness/matrix_products.h"

namespace zeropage::split_backward_test {
namespace {

using accumulate::SplitBackward;
using testing::error_of;
using ::testing::HasSubstr;

struct Layers {
  const char* name;
  std::vector<int64_t> input_sizes;
  // The module, and what is computed with it.
  std::function<std::pair<std::shared_ptr<torch::nn::Module>,
                          std::function<torch::Tensor(const torch::Tensor&)>>()>
      make;
};

template <typename M, typename Forward>
auto made(M module, Forward forward) {
  return std::pair<std::shared_ptr<torch::nn::Module>,
                   std::function<torch::Tensor(const torch::Tensor&)>>(
      module.ptr(),
      [module, forward](const torch::Tensor& x) mutable { return forward(module, x); });
}

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    before = register_module("before", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})));
    qkv = register_module("qkv", torch::nn::Linear(8, 24));
    down = register_module("down", torch::nn::Linear(8, 8));
    places = register_parameter("places", torch::randn({5, 8}));
    frozen = register_module("frozen", torch::nn::Linear(8, 8));
    for (torch::Tensor& parameter : frozen->parameters()) parameter.requires_grad_(false);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor placed = x + places;
    auto heads = qkv(before(placed)).view({2, 5, 3, 2, 4}).permute({2, 0, 3, 1, 4}).unbind(0);
    const torch::Tensor seen =
        at::scaled_dot_product_attention(heads[0], heads[1], heads[2], {}, 0, true);
    return x + frozen(torch::gelu(down(seen.transpose(1, 2).reshape({2, 5, 8}))));
  }
  torch::nn::LayerNorm before{nullptr};
  torch::nn::Linear qkv{nullptr}, down{nullptr}, frozen{nullptr};
  torch::Tensor places;
};
TORCH_MODULE(Block);

// x w, and another output. Computes what it is asked for.
struct Twice : torch::autograd::Function<Twice> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                const torch::Tensor& x, const torch::Tensor& w) {
    context->save_for_backward({x, w});
    return {x.matmul(w), x + 1};
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    torch::autograd::variable_list results(2);
    if (context->needs_input_grad(0)) {
      results[0] = gradients[0].matmul(saved[1].t()) + gradients[1];
    }
    if (context->needs_input_grad(1)) results[1] = saved[0].t().matmul(gradients[0]);
    return results;
  }
};

// Its input has no gradient, although it requires one.
struct Blocked : torch::autograd::Function<Blocked> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) {
    return x * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    return {torch::Tensor()};
  }
};

const std::vector<Layers>& all_layers() {
  static const std::vector<Layers> all = {
      {"blocks with attention",
       {2, 5, 8},
       [] {
         return made(torch::nn::Sequential(Block(), Block(),
                                           torch::nn::LayerNorm(torch::nn::LayerNormOptions({8}))),
                     [](torch::nn::Sequential& blocks, const torch::Tensor& x) {
                       return blocks->forward(x);
                     });
       }},
      {"convolutions and batch norms",
       {2, 3, 8, 8},
       [] {
         return made(
             torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3).padding(1)),
                                   torch::nn::BatchNorm2d(4), torch::nn::ReLU(),
                                   torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 4, 3).bias(false)),
                                   torch::nn::BatchNorm2d(4), torch::nn::Tanh()),
             [](torch::nn::Sequential& layers, const torch::Tensor& x) {
               return layers->forward(x);
             });
       }},
      // In turn by a layer, in place of one, and as what is added; so its gradient is a sum of many.
      {"a weight of several layers",
       {8, 8},
       [] {
         return made(torch::nn::Linear(8, 8), [](torch::nn::Linear& layer, const torch::Tensor& x) {
           torch::Tensor y = x;
           for (int repetition = 0; repetition < 3; ++repetition) {
             y = torch::tanh(layer(y)) + layer->weight;
             y = y.matmul(layer->weight) * layer->bias;
           }
           return y;
         });
       }},
      {"outputs of one operator and branches",
       {4, 8},
       [] {
         return made(torch::nn::Linear(8, 8), [](torch::nn::Linear& layer, const torch::Tensor& x) {
           const auto parts = layer(x).chunk(2, 1);
           return parts[0] * torch::sigmoid(parts[1]) + x.narrow(1, 0, 4);
         });
       }},
      {"group norms, whose operator has outputs that nobody uses",
       {2, 4, 5},
       [] {
         return made(torch::nn::Sequential(torch::nn::GroupNorm(2, 4), torch::nn::Linear(5, 5),
                                           torch::nn::GroupNorm(4, 4)),
                     [](torch::nn::Sequential& layers, const torch::Tensor& x) {
                       return layers->forward(x);
                     });
       }},
      {"a function with an output that nobody uses",
       {4, 8},
       [] {
         return made(torch::nn::Linear(8, 8), [](torch::nn::Linear& layer, const torch::Tensor& x) {
           return Twice::apply(torch::tanh(x), layer->weight)[0] + layer(x);
         });
       }},
      // The layer's gradient is undefined behind the one, and zeros behind the other.
      {"functions that have no gradient for a fork",
       {4, 8},
       [] {
         return made(torch::nn::Sequential(torch::nn::Linear(8, 8), torch::nn::Linear(8, 8)),
                     [](torch::nn::Sequential& layers, const torch::Tensor& x) {
                       const auto linear = [&](int64_t index, const torch::Tensor& of) {
                         return layers->ptr(index)->as<torch::nn::Linear>()->forward(of);
                       };
                       return x + Blocked::apply(linear(0, x)) +
                              Blocked::apply(Twice::apply(x, layers->parameters()[2])[0]) +
                              linear(1, x);
                     });
       }},
      {"no parameter",
       {4, 8},
       [] {
         return made(torch::nn::Sequential(torch::nn::Tanh()),
                     [](torch::nn::Sequential& layers, const torch::Tensor& x) {
                       return layers->forward(x);
                     });
       }},
  };
  return all;
}

struct Gradients {
  torch::Tensor input;
  std::map<std::string, torch::Tensor> parameters;
  int64_t products = 0;
};

// Twice, so that gradients add up.
Gradients gradients_of(const Layers& layers, bool in_halves) {
  torch::manual_seed(5);
  const auto [module, forward] = layers.make();
  Gradients gradients;
  for (int pass = 0; pass < 2; ++pass) {
    const torch::Tensor input = torch::randn(layers.input_sizes).requires_grad_();
    const torch::Tensor output = forward(input), gradient = torch::randn(output.sizes());
    const testing::MatrixProducts products;
    if (in_halves) {
      SplitBackward backward(output, gradient, input);
      for (const torch::Tensor& parameter : module->parameters()) {
        EXPECT_TRUE(pass == 1 || !parameter.grad().defined());
      }
      gradients.input = backward.input_gradient();
      backward.finish();
      EXPECT_FALSE(input.grad().defined());
    } else {
      output.backward(gradient);
      gradients.input = input.grad();
    }
    gradients.products += products.seen();
  }
  for (const auto& item : module->named_parameters())
    gradients.parameters[item.key()] = item.value().grad();
  return gradients;
}

TEST(SplitBackwardTest, HasTheBitsAndTheMatrixProductsOfOneBackward) {
  for (const Layers& layers : all_layers()) {
    SCOPED_TRACE(layers.name);
    const Gradients one = gradients_of(layers, false), halves = gradients_of(layers, true);
    EXPECT_TRUE(torch::equal(halves.input, one.input));
    EXPECT_EQ(halves.products, one.products);
    EXPECT_EQ(one.products > 0, !one.parameters.empty());
    for (const auto& [name, gradient] : one.parameters) {
      ASSERT_EQ(halves.parameters.at(name).defined(), gradient.defined()) << name;
      if (!gradient.defined()) continue;
      EXPECT_TRUE(torch::equal(halves.parameters.at(name), gradient)) << name;
    }
  }
}

TEST(SplitBackwardTest, CallsEachHookOnceAndParametersHooksInTheOneSecondHalf) {
  torch::nn::Linear first(4, 4), second(4, 4);
  std::vector<std::string> calls;
  const auto note = [&](const torch::Tensor& tensor, const char* name, bool at_end) {
    tensor.register_hook([&calls, name, at_end](const torch::Tensor&) {
      calls.emplace_back(name);
      if (!at_end) return;
      torch::autograd::Engine::get_default_engine().queue_callback(
          [&calls] { calls.emplace_back("end"); });
    });
  };
  const torch::Tensor x = torch::ones({2, 4}).requires_grad_();
  const torch::Tensor middle = first(x), output = second(middle);
  note(first->weight, "first.weight", true);
  note(second->weight, "second.weight", false);
  note(middle, "middle", false);
  note(output, "output", false);
  note(x, "x", false);
  SplitBackward backward(output, torch::ones_like(output), x);
  EXPECT_THAT(calls, ::testing::ElementsAre("output", "middle", "x"));
  calls.clear();
  backward.finish();
  EXPECT_THAT(calls, ::testing::ElementsAre("second.weight", "first.weight", "end"));
}

TEST(SplitBackwardTest, LetsGoBetweenTheHalvesWhatParametersDoNotNeed) {
  torch::nn::Linear first(4, 4), second(4, 4);
  const torch::Tensor x = torch::ones({2, 4}).requires_grad_();
  torch::Tensor before = torch::tanh(x), between = first(before),
                behind = second(torch::gelu(between));
  torch::Tensor output = torch::exp(behind);
  const auto weak_of = [](const torch::Tensor& tensor) {
    return tensor.storage().getWeakStorageImpl();
  };
  const auto of_before = weak_of(before), of_between = weak_of(between),
             of_output = weak_of(output);
  SplitBackward backward(output, torch::ones_like(output), x);
  for (torch::Tensor* const tensor : {&before, &between, &behind, &output}) tensor->reset();
  EXPECT_FALSE(of_before.expired());
  EXPECT_TRUE(of_between.expired());
  EXPECT_TRUE(of_output.expired());
  backward.finish();
  EXPECT_TRUE(of_before.expired());
}

TEST(SplitBackwardTest, IsAWholeBackwardInItsSecondHalfWhereNoInputIsWaitedFor) {
  torch::nn::Linear layer(4, 4);
  const torch::Tensor x = torch::ones({2, 4}), other = torch::ones({1}).requires_grad_();
  for (const torch::Tensor& input : {torch::Tensor(), other}) {
    layer->zero_grad();
    const torch::Tensor output = layer(x);
    SplitBackward backward(output, torch::ones_like(output), input);
    EXPECT_FALSE(backward.input_gradient().defined());
    EXPECT_FALSE(layer->weight.grad().defined());
    backward.finish();
    EXPECT_TRUE(torch::equal(layer->bias.grad(), torch::full({4}, 2.0)));
  }
}

TEST(SplitBackwardTest, RefusesWhatItCannotCut) {
  const torch::Tensor x = torch::ones({2}).requires_grad_(), y = x * 2;
  EXPECT_THAT(error_of([&] { SplitBackward(y, torch::ones({3}), x); }),
              HasSubstr("a gradient of its sizes, [2], got [3]"));
  EXPECT_THAT(error_of([&] { SplitBackward(y, torch::ones({2}), y); }),
              HasSubstr("an input that is a leaf"));
  SplitBackward backward(y, torch::ones({2}), x);
  backward.finish();
  EXPECT_THAT(error_of([&] { backward.finish(); }), HasSubstr("was called before"));
}

}  // namespace
}  // namespace zeropage::split_backward_test
