#include "paging/trap.h"

#include <atomic>
#include <functional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "memory/self_check.h"
#include "operators/dispatch_keys.h"
#include "paging/pins.h"
#include "tests/harness/errors.h"
#include "tests/harness/fake_page_source.h"
#include "tests/harness/reference.h"
#include "tests/harness/tiny_models.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"

namespace zeropage::paging::trap_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using zeropage::testing::distinct_parameters;
using zeropage::testing::error_of;
using zeropage::testing::EvictBeforeEveryOperator;
using zeropage::testing::FakePaging;
using zeropage::testing::same_bits;

bool is_trapped(const at::Tensor& tensor) {
  return tensor.key_set().has(operators::kTrapKey);
}

void evict(FakePaging& paging) {
  paging.pager->release_all("the test");
}

std::unique_ptr<Pins> keep(FakePaging& paging, const std::vector<size_t>& pages) {
  auto pins = std::make_unique<Pins>();
  for (const size_t page : pages) pins->add({paging.pager, page}, /*writes=*/false);
  pins->take_outside_trace("GatheredParameters");
  return pins;
}

// ---- parity: the plain module's bits, whenever pages go ----

enum class Eviction { kAtItsOwnPace, kBeforeEveryOperator };

struct Trained {
  std::vector<at::Tensor> losses, gradients, parameters, buffers;
};

template <typename Module, typename Loss>
Trained train(const Module& module, const Loss& loss_of, Pager* pager) {
  Trained trained;
  for (int step = 0; step < 3; ++step) {
    torch::manual_seed(100 + step);
    const at::Tensor loss = loss_of(module);
    trained.losses.push_back(loss.detach().clone());
    loss.backward();
    const at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : distinct_parameters(module)) {
      if (!parameter.grad().defined()) continue;
      trained.gradients.push_back(parameter.grad().clone());
      parameter.add_(parameter.grad(), -0.1);
      parameter.mutable_grad().reset();
    }
    if (pager != nullptr) pager->end_pass(Pass::kTraining);
  }
  if (pager != nullptr) pager->release_all("the test");
  for (const at::Tensor& parameter : distinct_parameters(module)) {
    trained.parameters.push_back(parameter.detach().clone());
  }
  for (const at::Tensor& buffer : module->buffers()) trained.buffers.push_back(buffer.clone());
  return trained;
}

// make(): builds the module, alike each time. loss_of(module): a forward pass.
template <typename Make, typename Loss>
void expect_parity(const Make& make, const Loss& loss_of) {
  torch::manual_seed(1);
  const Trained plain = train(make(), loss_of, nullptr);
  for (const Eviction eviction : {Eviction::kAtItsOwnPace, Eviction::kBeforeEveryOperator}) {
    SCOPED_TRACE(eviction == Eviction::kAtItsOwnPace ? "pages go at their own pace"
                                                     : "pages go before every operator");
    torch::manual_seed(1);
    const auto module = make();
    FakePaging paging;
    paging.add_parameters(module);
    Trained paged;
    {
      std::optional<EvictBeforeEveryOperator> worst;
      if (eviction == Eviction::kBeforeEveryOperator) worst.emplace(paging.pager);
      paged = train(module, loss_of, paging.pager.get());
    }
    EXPECT_TRUE(same_bits(plain.losses, paged.losses)) << "losses";
    EXPECT_TRUE(same_bits(plain.gradients, paged.gradients)) << "gradients";
    EXPECT_TRUE(same_bits(plain.parameters, paged.parameters)) << "parameters";
    EXPECT_TRUE(same_bits(plain.buffers, paged.buffers)) << "buffers";
    const memory::PagingStatistics statistics = paging.pager->statistics();
    EXPECT_GE(statistics.faults + statistics.prefetched,
              static_cast<int64_t>(plain.parameters.size()))
        << "nothing was paged";
  }
}

struct TinyGptImpl : torch::nn::Module {
  TinyGptImpl() {
    tokens = register_module("tokens", torch::nn::Embedding(11, 8));
    places = register_parameter("places", torch::randn({5, 8}));
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})));
    qkv = register_module("qkv", torch::nn::Linear(8, 24));
    out = register_module("out", torch::nn::Linear(8, 8));
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})));
    up = register_module("up", torch::nn::Linear(8, 32));
    down = register_module("down", torch::nn::Linear(32, 8));
    dropout = register_module("dropout", torch::nn::Dropout(0.1));
  }
  torch::Tensor forward(const torch::Tensor& ids) {  // [batch, 5] -> [batch, 5, 11]
    auto x = tokens(ids) + places.narrow(0, 0, ids.size(1));
    const auto parts = qkv(norm1(x)).view({-1, 5, 3, 2, 4}).permute({2, 0, 3, 1, 4}).unbind(0);
    const auto heads = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0,
                                                        /*is_causal=*/true);
    x = x + dropout(out(heads.transpose(1, 2).reshape({-1, 5, 8})));
    x = x + down(torch::gelu(up(norm2(x))));
    return torch::matmul(x, tokens->weight.t());
  }
  torch::nn::Embedding tokens{nullptr};
  torch::Tensor places;
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
  torch::nn::Dropout dropout{nullptr};
};
TORCH_MODULE(TinyGpt);

at::Tensor some_ids() {
  return torch::randint(0, 11, {3, 5}, torch::kLong);
}

TEST(TrapParityTest, HoldsForAGptWithATiedHead) {
  expect_parity([] { return TinyGpt(); },
                [](TinyGpt gpt) {
                  const auto logits = gpt(some_ids());
                  return torch::cross_entropy_loss(logits.view({-1, 11}), some_ids().view({-1}));
                });
}

TEST(TrapParityTest, HoldsForAnLstm) {
  const auto options = torch::nn::LSTMOptions(4, 6).num_layers(2).bidirectional(true).dropout(0.2);
  expect_parity([&] { return torch::nn::LSTM(options); },
                [](torch::nn::LSTM lstm) {
                  const auto [output, state] = lstm(torch::randn({5, 3, 4}));
                  return output.square().mean() + std::get<1>(state).sum();
                });
}

TEST(TrapParityTest, HoldsForAGru) {
  expect_parity([] { return torch::nn::GRU(torch::nn::GRUOptions(4, 6).num_layers(2)); },
                [](torch::nn::GRU gru) {
                  return std::get<0>(gru(torch::randn({5, 3, 4}))).square().mean();
                });
}

TEST(TrapParityTest, HoldsForAConvolutionWithBatchNorm) {
  const auto make = [] {
    return torch::nn::Sequential(
        torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 6, 3).padding(1)), torch::nn::BatchNorm2d(6),
        torch::nn::ReLU(), torch::nn::Conv2d(torch::nn::Conv2dOptions(6, 4, 3).groups(2)),
        torch::nn::ConvTranspose2d(torch::nn::ConvTranspose2dOptions(4, 2, 3).bias(false)),
        torch::nn::GroupNorm(1, 2), torch::nn::PReLU());
  };
  expect_parity(make, [](torch::nn::Sequential net) {
    return net->forward(torch::randn({2, 2, 6, 6})).square().mean();
  });
}

TEST(TrapParityTest, HoldsForAttention) {
  const auto options = torch::nn::MultiheadAttentionOptions(8, 2).add_bias_kv(true).dropout(0.1);
  expect_parity([&] { return torch::nn::MultiheadAttention(options); },
                [](torch::nn::MultiheadAttention attention) {
                  const auto x = torch::randn({4, 2, 8});
                  return std::get<0>(attention(x, x, x)).square().mean();
                });
}

TEST(TrapParityTest, HoldsForATransformerLayer) {
  expect_parity(
      [] {
        return torch::nn::TransformerEncoderLayer(
            torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(16));
      },
      [](torch::nn::TransformerEncoderLayer layer) {
        return layer(torch::randn({4, 2, 8})).square().mean();
      });
}

TEST(TrapParityTest, HoldsForEmbeddings) {
  struct EmbeddingsImpl : torch::nn::Module {
    EmbeddingsImpl() {
      padded = register_module(
          "padded", torch::nn::Embedding(torch::nn::EmbeddingOptions(11, 4).padding_idx(3)));
      bounded = register_module(
          "bounded", torch::nn::Embedding(torch::nn::EmbeddingOptions(11, 4).max_norm(0.5)));
      bag = register_module("bag", torch::nn::EmbeddingBag(11, 4));
    }
    torch::nn::Embedding padded{nullptr}, bounded{nullptr};
    torch::nn::EmbeddingBag bag{nullptr};
  };
  using Embeddings = torch::nn::ModuleHolder<EmbeddingsImpl>;
  // max_norm writes to the weight in forward.
  expect_parity([] { return Embeddings(std::make_shared<EmbeddingsImpl>()); },
                [](Embeddings e) {
                  const auto ids = some_ids();
                  return e->padded(ids).square().sum() + e->bounded(ids).square().mean() +
                         e->bag(ids).sum();
                });
}

TEST(TrapParityTest, HoldsForParametersOfEveryOddKind) {
  expect_parity([] { return zeropage::testing::Oddball(); },
                [](zeropage::testing::Oddball odd) {
                  return odd(torch::randn({3, 7})).square().mean();
                });
}

TEST(TrapParityTest, HoldsForAParameterOutsideOfAnyModule) {
  const auto run = [](const at::Tensor& weight) {
    const at::Tensor input = at::linspace(-1, 1, 16).view({4, 4});
    // Twice in one graph, once in one operator.
    const auto loss = (at::matmul(input, weight) * weight).sum() + (weight * weight).mean();
    loss.backward();
    return weight.grad();
  };
  const auto make = [] { return at::linspace(0, 3, 16).view({4, 4}).clone().requires_grad_(); };
  const at::Tensor weight = make();
  FakePaging paging;
  paging.add("weight", weight);
  const EvictBeforeEveryOperator worst(paging.pager);
  EXPECT_TRUE(at::equal(run(weight), run(make())));
  EXPECT_FALSE(is_trapped(weight.grad()));
}

TEST(TrapParityTest, HoldsForDoubleBackward) {
  expect_parity(
      [] {
        return torch::nn::Sequential(torch::nn::Linear(4, 5), torch::nn::Tanh(),
                                     torch::nn::Linear(5, 1));
      },
      [](torch::nn::Sequential net) {
        const auto parameters = net->parameters();
        const auto input = torch::randn({3, 4}).requires_grad_();
        const auto output = net->forward(input).square().sum();
        auto gradients = torch::autograd::grad({output}, {input, parameters[0]}, {}, true, true);
        return output + gradients[0].square().sum() + gradients[1].square().sum();
      });
}

TEST(TrapParityTest, HoldsForAnAutogradFunctionOfTheUser) {
  struct Scaled : torch::autograd::Function<Scaled> {
    static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                              const at::Tensor& weight) {
      context->save_for_backward({input, weight});
      return input * weight;
    }
    static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::tensor_list gradients) {
      const auto saved = context->get_saved_variables();
      return {gradients[0] * saved[1], gradients[0] * saved[0]};
    }
  };
  expect_parity([] { return torch::nn::Linear(4, 4); },
                [](torch::nn::Linear linear) {
                  return Scaled::apply(linear(torch::randn({4, 4})), linear->weight).square().sum();
                });
}

TEST(TrapParityTest, HoldsUnderAutocast) {
  struct Autocast {
    Autocast() {
      at::autocast::set_autocast_enabled(at::kCPU, true);
      at::autocast::increment_nesting();
    }
    ~Autocast() {
      if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(at::kCPU, false);
    }
  };
  expect_parity(
      [] { return torch::nn::Sequential(torch::nn::Linear(4, 5), torch::nn::Linear(5, 2)); },
      [](torch::nn::Sequential net) {
        const Autocast autocast;
        const auto output = net->forward(torch::randn({3, 4}));
        EXPECT_EQ(output.scalar_type(), at::kBFloat16);
        return output.to(at::kFloat).square().sum();
      });
}

TEST(TrapParityTest, HoldsForClippedGradients) {
  const auto clipped = [](torch::nn::Linear linear) {
    linear(at::linspace(0, 9, 12).view({3, 4})).square().sum().backward();
    const double norm = torch::nn::utils::clip_grad_norm_(linear->parameters(), 0.5);
    return std::pair(norm, linear->weight.grad());
  };
  torch::manual_seed(1);
  const auto expected = clipped(torch::nn::Linear(4, 3));
  torch::manual_seed(1);
  const torch::nn::Linear linear(4, 3);
  FakePaging paging;
  paging.add_parameters(linear);
  const EvictBeforeEveryOperator worst(paging.pager);
  const auto actual = clipped(linear);
  EXPECT_EQ(actual.first, expected.first);
  EXPECT_TRUE(at::equal(actual.second, expected.second));
}

TEST(TrapParityTest, HoldsForOptimizersOfLibTorch) {
  const auto trained = [](torch::nn::Linear linear, auto optimizer) {
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      linear(at::linspace(0, 1, 12).view({3, 4})).square().sum().backward();
      optimizer.step();
    }
    return std::vector<at::Tensor>{linear->weight.detach().clone(), linear->bias.detach().clone()};
  };
  const auto expect = [&](auto make_optimizer) {
    torch::manual_seed(1);
    const torch::nn::Linear plain(4, 3);
    const auto expected = trained(plain, make_optimizer(plain->parameters()));
    torch::manual_seed(1);
    const torch::nn::Linear paged(4, 3);
    FakePaging paging;
    paging.add_parameters(paged);
    const EvictBeforeEveryOperator worst(paging.pager);
    EXPECT_TRUE(same_bits(expected, trained(paged, make_optimizer(paged->parameters()))));
  };
  expect([](auto parameters) { return torch::optim::Adam(parameters, 0.1); });
  expect([](auto parameters) { return torch::optim::AdamW(parameters, 0.1); });
  expect([](auto parameters) { return torch::optim::RMSprop(parameters, 0.1); });
  expect([](auto parameters) { return torch::optim::Adagrad(parameters, 0.1); });
  expect([](auto parameters) {
    return torch::optim::SGD(parameters,
                             torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(1));
  });
}

TEST(TrapParityTest, HoldsForInferenceBetweenTrainingSteps) {
  const auto run = [](torch::nn::Sequential net) {
    std::vector<at::Tensor> results;
    const auto x = at::linspace(-1, 1, 12).view({3, 4});
    for (int step = 0; step < 2; ++step) {
      {
        const c10::InferenceMode inference;
        net->eval();
        results.push_back(net->forward(x).clone());
        EXPECT_TRUE(results.back().is_inference());
      }
      {
        const at::NoGradGuard no_grad;
        results.push_back(net->forward(x).clone());
      }
      net->train();
      torch::manual_seed(step);
      net->forward(x).square().sum().backward();
    }
    for (const auto& parameter : net->parameters()) results.push_back(parameter.grad());
    return results;
  };
  const auto make = [] {
    torch::manual_seed(1);
    return torch::nn::Sequential(torch::nn::Linear(4, 5), torch::nn::Dropout(0.5),
                                 torch::nn::Linear(5, 2));
  };
  const auto expected = run(make());
  const auto net = make();
  FakePaging paging;
  paging.add_parameters(net);
  const EvictBeforeEveryOperator worst(paging.pager);
  const auto actual = run(net);
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t index = 0; index < actual.size(); ++index) {
    EXPECT_TRUE(at::equal(actual[index], expected[index])) << index;
  }
}

TEST(TrapParityTest, HoldsWhenBackwardRunsOnAnotherThread) {
  const auto run = [](torch::nn::Linear linear) {
    const auto loss = linear(at::linspace(0, 1, 12).view({3, 4})).square().sum();
    std::thread([&] { loss.backward(); }).join();
    return linear->weight.grad();
  };
  torch::manual_seed(1);
  const at::Tensor expected = run(torch::nn::Linear(4, 3));
  torch::manual_seed(1);
  const torch::nn::Linear linear(4, 3);
  FakePaging paging;
  paging.add_parameters(linear);
  EXPECT_TRUE(at::equal(run(linear), expected));
}

// ---- operators one by one ----

// A parameter [4, 6] and a copy of it without a page.
class TrapTest : public ::testing::Test {
 protected:
  TrapTest() { paging_.add("weight", weight_); }

  // Faults since the last call.
  int64_t faults() { return paging_.faults() - std::exchange(faults_before_, paging_.faults()); }
  bool is_resident() const { return weight_.data_ptr() != nullptr; }

  // The operator on the evicted parameter gives what it gives on the plain one, and faults.
  void expect_equal(const char* what, const std::function<at::Tensor(at::Tensor)>& run) {
    SCOPED_TRACE(what);
    evict(paging_);
    faults();
    const at::Tensor expected = run(plain_), actual = run(weight_);
    EXPECT_GE(faults(), 1) << "it was not brought";
    EXPECT_FALSE(is_trapped(actual)) << "a copy must be free of its page";
    evict(paging_);
    EXPECT_TRUE(at::equal(expected, actual));
  }

  const at::Tensor plain_ =
      at::linspace(-2, 2.6, 24, at::kFloat).view({4, 6}).clone().requires_grad_();
  const at::Tensor weight_ = plain_.detach().clone().requires_grad_();
  FakePaging paging_;

 private:
  int64_t faults_before_ = 0;
};

TEST_F(TrapTest, FindsADispatcherThatBehaves) {
  EXPECT_EQ(error_of([] { check_dispatcher(); }), "");
  const c10::InferenceMode inference;
  EXPECT_EQ(error_of([] { check_dispatcher(); }), "");
}

TEST_F(TrapTest, FindsADispatcherThatPassesTheTrapBy) {
  memory::SelfCheck check("sharded parameters", "stage 0 or 1", [] {
    const c10::impl::ExcludeDispatchKeyGuard passed_by(operators::kTrapKey);
    probe_dispatcher();
  });
  EXPECT_THAT(error_of([&] { check.require(); }),
              HasSubstr("the device of a view of an evicted parameter: expected cpu, got meta; "
                        "use a release that README.md names"));
}

TEST_F(TrapTest, LeavesTheTensorTheSameObject) {
  const at::Tensor tensor = at::ones({2, 3}).t().requires_grad_();
  const auto* impl = tensor.unsafeGetTensorImpl();
  set_trap(tensor);
  set_trap(tensor);
  EXPECT_EQ(tensor.unsafeGetTensorImpl(), impl);
  EXPECT_TRUE(is_trapped(tensor));
  EXPECT_TRUE(tensor.requires_grad() && tensor.is_leaf());
  EXPECT_EQ(tensor.sizes(), (std::vector<int64_t>{3, 2}));
  EXPECT_EQ(tensor.strides(), (std::vector<int64_t>{1, 3}));
  EXPECT_EQ(tensor.sum().item<float>(), 6.0F) << "not paged yet: all passes";
}

TEST_F(TrapTest, HasNoMemoryWhileEvicted) {
  EXPECT_EQ(weight_.data_ptr(), nullptr);
  EXPECT_EQ(weight_.nbytes(), 96U);
  EXPECT_EQ(weight_.storage().nbytes(), 96U);
  EXPECT_EQ(weight_.device(), at::kCPU);
  EXPECT_THROW((weight_.accessor<float, 2>()), c10::Error) << "a null pointer is not handed out";
  EXPECT_THROW(weight_.data_ptr<float>(), c10::Error);
  (void)weight_.sum();
  EXPECT_NE(weight_.data_ptr(), nullptr);
}

TEST_F(TrapTest, MakesViewsWithoutAFault) {
  const std::vector<std::pair<const char*, std::function<at::Tensor(at::Tensor)>>> views = {
      {"t", [](auto p) { return p.t(); }},
      {"view",
       [](auto p) {
         return p.view({6, 4});
       }},
      {"view of another dtype", [](auto p) { return p.detach().view(at::kInt); }},
      {"transpose", [](auto p) { return p.transpose(0, 1); }},
      {"split", [](auto p) { return p.split(2, 0)[1]; }},
      {"split with sizes",
       [](auto p) {
         return p.split_with_sizes({1, 5}, 1)[1];
       }},
      {"chunk", [](auto p) { return p.chunk(3, 1)[2]; }},
      {"unbind", [](auto p) { return p.unbind(0)[3]; }},
      {"narrow", [](auto p) { return p.narrow(1, 2, 3); }},
      {"slice", [](auto p) { return p.slice(0, 1, 4, 2); }},
      {"select", [](auto p) { return p.select(0, 3); }},
      {"operator[]", [](auto p) { return p[2][1]; }},
      {"index of slices",
       [](auto p) {
         return p.index({torch::indexing::Slice(1, 3), 2});
       }},
      {"expand",
       [](auto p) {
         return p.expand({2, 4, 6});
       }},
      {"permute",
       [](auto p) {
         return p.permute({1, 0});
       }},
      {"squeeze", [](auto p) { return p.unsqueeze(0).squeeze(); }},
      {"unsqueeze", [](auto p) { return p.unsqueeze(1); }},
      {"detach", [](auto p) { return p.detach(); }},
      {"alias", [](auto p) { return at::alias(p); }},
      {"diagonal", [](auto p) { return p.diagonal(); }},
      {"unfold", [](auto p) { return p.unfold(0, 2, 1); }},
      {"reshape",
       [](auto p) {
         return p.reshape({2, 12});
       }},
      {"flatten", [](auto p) { return p.flatten(); }},
      {"contiguous", [](auto p) { return p.contiguous(); }},
      {"as_strided",
       [](auto p) {
         return p.as_strided({3, 2}, {6, 2}, 1);
       }},
      {"view_as",
       [](auto p) {
         return p.view_as(at::empty({8, 3}));
       }},
      {"to, already there", [](auto p) { return p.to(at::kFloat); }},
      {"data", [](auto p) { return p.data(); }},
      {"variable_data", [](auto p) { return p.variable_data(); }},
      {"tensor_data", [](auto p) { return p.tensor_data(); }},
      {"in-place views", [](auto p) { return p.detach().t_().unsqueeze_(0).squeeze_(); }},
  };
  for (const auto& [what, make] : views) {
    SCOPED_TRACE(what);
    evict(paging_);
    faults();
    const at::Tensor view = make(weight_);
    EXPECT_EQ(faults(), 0);
    EXPECT_FALSE(is_resident());
    EXPECT_EQ(view.device(), at::kCPU);
    EXPECT_TRUE(is_trapped(view));
    EXPECT_TRUE(view.is_alias_of(weight_));
    const at::Tensor expected = make(plain_);
    EXPECT_EQ(view.sizes(), expected.sizes());
    EXPECT_EQ(view.requires_grad(), expected.requires_grad());
    EXPECT_TRUE(at::equal(view, expected)) << "the view is trapped and brings its page";
    EXPECT_EQ(faults(), 1);
  }
}

TEST_F(TrapTest, MakesTensorsLikeAParameterWithoutAFault) {
  for (const at::Tensor& like : {at::zeros_like(weight_), at::empty_like(weight_),
                                 at::ones_like(weight_), at::randn_like(weight_)}) {
    EXPECT_FALSE(is_trapped(like));
    EXPECT_EQ(like.device(), at::kCPU);
    EXPECT_NE(like.data_ptr(), nullptr);
  }
  EXPECT_TRUE(at::equal(at::full_like(weight_, 3), at::full({4, 6}, 3.0F)));
  EXPECT_EQ(faults(), 0);
  EXPECT_FALSE(is_trapped(weight_.new_zeros({2})));
}

TEST_F(TrapTest, BringsThePageForOperatorsThatRead) {
  const at::Tensor rows = at::tensor({2, 0, 2}, at::kLong);
  const at::Tensor other = at::full({4, 6}, 0.5F);
  expect_equal("add", [&](auto p) { return p + other; });
  expect_equal("both sides", [](auto p) { return p.mul(p.detach()).add(p); });
  expect_equal("matmul of views", [](auto p) { return at::matmul(p.t(), p); });
  expect_equal("reshape that copies", [](auto p) { return p.t().reshape({24}); });
  expect_equal("contiguous that copies", [](auto p) { return p.t().contiguous(); });
  expect_equal("flatten that copies", [](auto p) { return p.t().flatten(); });
  expect_equal("to another dtype", [](auto p) { return p.to(at::kDouble); });
  expect_equal("to with a copy",
               [](auto p) { return p.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true); });
  expect_equal("detach and clone", [](auto p) { return p.detach().clone(); });
  expect_equal("clone of a view", [](auto p) { return p.t().clone(); });
  expect_equal("cat", [&](auto p) { return at::cat({other, p, p}, 1); });
  expect_equal("stack", [&](auto p) { return at::stack({p, other}); });
  expect_equal("repeat", [](auto p) { return p.repeat({2, 1}); });
  expect_equal("index", [&](auto p) { return at::index(p, {rows}); });
  expect_equal("index of some dimensions", [&](auto p) {
    return at::index(p, {std::optional<at::Tensor>(), std::optional<at::Tensor>(rows)});
  });
  expect_equal("index by a mask", [](auto p) { return p.index({p > 0}); });
  expect_equal("index_select", [&](auto p) { return at::index_select(p, 0, rows); });
  expect_equal("gather", [&](auto p) { return p.gather(0, rows.view({3, 1})); });
  expect_equal("take", [&](auto p) { return p.take(rows); });
  expect_equal("where", [&](auto p) { return at::where(p > 0, p, other); });
  expect_equal("einsum", [](auto p) { return at::einsum("ij,kj->ik", {p, p}); });
  expect_equal("sort", [](auto p) { return std::get<0>(p.sort()); });
  expect_equal("max", [](auto p) { return std::get<0>(p.max(1)); });
  expect_equal("nonzero", [](auto p) { return p.nonzero(); });
  expect_equal("foreach", [&](auto p) { return at::_foreach_add({other, p}, 2)[1]; });
  expect_equal("foreach norm", [](auto p) { return at::_foreach_norm({p, p})[1]; });
  expect_equal("linear", [&](auto p) { return at::linear(other, p); });
  expect_equal("a scalar", [&](auto p) { return other * p[1][2]; });
  expect_equal("parameters_to_vector", [](auto p) {
    return torch::nn::utils::parameters_to_vector({p, p});
  });
  expect_equal("copy to another", [](auto p) {
    const auto target = at::empty({4, 6});
    target.copy_(p.detach());
    return target;
  });
  expect_equal("out of another", [](auto p) {
    auto target = at::empty({0});
    const at::NoGradGuard no_grad;
    at::add_out(target, p, p);
    return target;
  });
  expect_equal("values of index_put_", [&](auto p) {
    auto target = at::zeros({4, 6});
    target.index_put_({rows}, p.detach().narrow(0, 0, 3));
    return target;
  });
}

TEST_F(TrapTest, BringsThePageForValuesThatLeaveTheTensors) {
  const auto expect_evicted = [&] {
    evict(paging_);
    ASSERT_FALSE(is_resident());
  };
  expect_evicted();
  EXPECT_EQ(weight_[1][2].item<float>(), plain_[1][2].item<float>());
  expect_evicted();
  EXPECT_TRUE(at::equal(weight_, plain_));
  expect_evicted();
  EXPECT_TRUE(at::equal(plain_, weight_));
  expect_evicted();
  EXPECT_TRUE(at::allclose(weight_, plain_));
  expect_evicted();
  EXPECT_TRUE((weight_ > -10).all().item<bool>());
  expect_evicted();
  EXPECT_TRUE(at::is_nonzero(weight_[0][0]));
  EXPECT_EQ(faults(), 6);
}

std::string printed(const at::Tensor& tensor) {
  std::ostringstream stream;
  stream << tensor;
  return stream.str();
}

TEST_F(TrapTest, PrintsAnEvictedParameter) {
  for (const auto dtype : {at::kFloat, at::kLong}) {
    for (const at::Tensor& plain :
         {at::arange(6, dtype).view({2, 3}), at::full({}, 3, dtype), at::arange(3, dtype)}) {
      const at::Tensor weight = plain.clone();
      FakePaging paging;
      paging.add("weight", weight);
      EXPECT_EQ(printed(weight), printed(plain));
    }
  }
}

// operator<< reads doubles past the dispatcher, and others by a copy to double.
TEST_F(TrapTest, PrintsDoublesOnlyWhenTheyArePinned) {
  const at::Tensor plain = at::arange(6, at::kDouble), weight = plain.clone();
  paging_.add("doubles", weight);
  EXPECT_THAT(error_of([&] { printed(weight); }), HasSubstr("data is not allocated"));
  EXPECT_THAT(error_of([&] { printed(weight.narrow(0, 2, 2)); }), HasSubstr("not allocated"));
  const auto pins = keep(paging_, {1});
  EXPECT_EQ(printed(weight), printed(plain));
}

TEST_F(TrapTest, UsesIndicesThatLieInAPage) {
  const at::Tensor rows = at::tensor({2, 0}, at::kLong);
  const at::Tensor expected = plain_.index({rows});
  paging_.add("rows", rows);
  EXPECT_TRUE(at::equal(at::index(plain_, {std::optional<at::Tensor>(rows)}), expected));
  evict(paging_);
  EXPECT_TRUE(at::equal(at::index_select(weight_, 0, rows), expected));
  evict(paging_);
  auto target = at::zeros({4, 6});
  target.index_put_({std::optional<at::Tensor>(rows)}, at::ones({2, 6}));
  EXPECT_EQ(target.sum().item<float>(), 12.0F);
}

TEST_F(TrapTest, KeepsWhatIsWrittenInPlace) {
  const at::Tensor other = at::full({4, 6}, 0.5F);
  const at::Tensor rows = at::tensor({2, 0}, at::kLong);
  using Write = std::function<void(at::Tensor)>;
  const std::vector<std::pair<const char*, Write>> writes = {
      {"fill_", [](auto p) { p.fill_(3); }},
      {"copy_", [&](auto p) { p.copy_(other); }},
      {"copy_ of a view of itself", [](auto p) { p[0].copy_(p[1]); }},
      {"add_", [&](auto p) { p.add_(other, 2); }},
      {"operator+=", [&](auto p) { p += p; }},
      {"zero_ of a view", [](auto p) { p.select(0, 1).zero_(); }},
      {"mul_ of a transposed view", [](auto p) { p.t().narrow(0, 1, 2).mul_(4); }},
      {"an element", [](auto p) { p[1][2] = 5.0F; }},
      {"data", [](auto p) { p.data().mul_(2); }},
      {"normal_", [](auto p) { torch::manual_seed(3), torch::nn::init::normal_(p); }},
      {"xavier_uniform_",
       [](auto p) { torch::manual_seed(3), torch::nn::init::xavier_uniform_(p); }},
      {"add_out", [&](auto p) { at::add_out(p, other, other); }},
      {"mul_out of itself", [&](auto p) { at::mul_out(p, p, other); }},
      {"matmul_out",
       [&](auto p) {
         at::matmul_out(p, at::ones({4, 2}), at::ones({2, 6}));
       }},
      {"cat_out",
       [&](auto p) {
         at::cat_out(p, {at::ones({2, 6}), at::zeros({2, 6})});
       }},
      {"out of two",
       [&](auto p) {
         auto indices = at::empty({6}, at::kLong);
         auto row = p[0];
         at::max_out(row, indices, other, 0);
       }},
      {"index_put_",
       [&](auto p) {
         p.index_put_({rows}, at::ones({2, 6}));
       }},
      {"index_put_ of a mask", [](auto p) { p.index_put_({p > 0}, 1); }},
      {"index_add_",
       [&](auto p) {
         p.index_add_(0, rows, at::ones({2, 6}));
       }},
      {"index_copy_",
       [&](auto p) {
         p.index_copy_(0, rows, at::ones({2, 6}));
       }},
      {"scatter_",
       [&](auto p) {
         p.scatter_(0, rows.view({1, 2}), 9);
       }},
      {"masked_fill_", [](auto p) { p.masked_fill_(p > 0, 7); }},
      {"addcmul_", [&](auto p) { p.addcmul_(other, other, 2); }},
      {"addmm_",
       [](auto p) {
         p.addmm_(at::ones({4, 2}), at::ones({2, 6}));
       }},
      {"clamp_", [](auto p) { p.clamp_(-1, 1); }},
      {"relu_", [](auto p) { at::relu_(p); }},
      {"_foreach_add_",
       [&](auto p) {
         at::_foreach_add_({p, other.clone()}, 2);
       }},
      {"_foreach_copy_", [&](auto p) { at::_foreach_copy_({p}, {other}); }},
      {"_foreach_mul_ of views",
       [](auto p) {
         at::_foreach_mul_({p[0], p[2]}, 3);
       }},
      {"_foreach_zero_", [](auto p) { at::_foreach_zero_({p}); }},
      {"split and copy",
       [](auto p) {
         auto parts = p.split(2, 0);
         parts[0].copy_(parts[1]);
       }},
      {"_fused_sgd_",
       [&](auto p) {
         at::_fused_sgd_({p}, {other}, {at::ones({4, 6})}, 0.1, 0.9, 0.1, 0.0, false, false, false);
       }},
  };
  const at::NoGradGuard no_grad;
  for (const auto& [what, write] : writes) {
    SCOPED_TRACE(what);
    evict(paging_);
    paging_.pages->written_back.clear();
    const at::Tensor before = plain_.clone();
    write(weight_);
    evict(paging_);
    EXPECT_EQ(paging_.pages->written_back.size(), 1U) << "the page is written to";
    write(plain_);
    EXPECT_TRUE(at::equal(weight_, plain_)) << weight_ << plain_;
    EXPECT_FALSE(at::equal(before, plain_)) << "this case writes nothing";
    weight_.copy_(before);
    plain_.copy_(before);
  }
}

TEST_F(TrapTest, LeavesAPageCleanThatIsOnlyRead) {
  (void)(weight_ + weight_).sum();
  (void)at::cat({weight_, weight_});
  auto target = at::zeros({4, 6});
  target.copy_(weight_.detach());
  evict(paging_);
  EXPECT_TRUE(paging_.pages->written_back.empty());
}

TEST_F(TrapTest, SeesWritesInAutogradsVersions) {
  const auto saved = (weight_ * weight_).sum();
  {
    const at::NoGradGuard no_grad;
    weight_.add_(1);
  }
  evict(paging_);
  EXPECT_THAT(error_of([&] { saved.backward(); }), HasSubstr("modified by an inplace operation"));
}

TEST_F(TrapTest, ReshapesAParameterThatIsNotContiguous) {
  const at::Tensor plain = at::arange(12, at::kFloat).view({3, 4}).t().requires_grad_();
  const at::Tensor strided = at::arange(12, at::kFloat).view({3, 4}).t().detach().requires_grad_();
  paging_.add("strided", strided);
  for (const auto& copy : std::vector<std::function<at::Tensor(at::Tensor)>>{
           [](auto p) { return p.reshape({-1}); }, [](auto p) { return p.contiguous(); },
           [](auto p) { return p.flatten(); },
           [](auto p) {
             return p.reshape({2, 6}) * 2;
           }}) {
    evict(paging_);
    EXPECT_TRUE(at::equal(copy(strided), copy(plain)));
  }
}

TEST_F(TrapTest, ServesOneOperatorFromTwoPagers) {
  const at::Tensor bias = at::linspace(0, 1, 6).requires_grad_();
  const at::Tensor expected = plain_ + bias;
  FakePaging other;
  other.add("bias", bias);
  EXPECT_TRUE(at::equal(weight_ + bias, expected));
  EXPECT_EQ(paging_.faults(), 1);
  EXPECT_EQ(other.faults(), 1);
  other.pages->on_start = [](size_t) { throw std::runtime_error("no bias"); };
  evict(other);
  EXPECT_EQ(error_of([&] { (void)(weight_ + bias); }), "no bias");
  EXPECT_FALSE(paging_.pager->is_pinned(0)) << "the first pager's pins are let go";
}

TEST_F(TrapTest, LetsGoOfItsPinsWhenAnOperatorFails) {
  EXPECT_THROW((void)at::matmul(weight_, weight_), c10::Error);
  EXPECT_FALSE(paging_.pager->is_pinned(0));
  evict(paging_);
  EXPECT_TRUE(at::equal(weight_, plain_));
}

TEST_F(TrapTest, NamesTheOperatorThatTheBudgetIsTooSmallFor) {
  FakePaging tight({.budget_bytes = 128});
  const at::Tensor left = at::ones({5, 5}).requires_grad_(), right = at::ones({5, 5});
  tight.add("left", left);
  tight.add("right", right);
  EXPECT_THAT(error_of([&] { (void)at::matmul(left, right); }),
              AllOf(HasSubstr("aten::matmul needs parameter pages \"left\" (100 B), \"right\""),
                    HasSubstr("raise it to at least 200 bytes")));
  EXPECT_EQ(left.sum().item<float>() + right.sum().item<float>(), 50.0F);
}

TEST_F(TrapTest, RunsOperatorsOfSeveralThreads) {
  constexpr int kThreads = 4, kOperators = 150;
  FakePaging tight({.budget_bytes = 3 * 256, .prefetch_bytes = 0});
  std::vector<at::Tensor> weights, plain;
  for (int index = 0; index < 5; ++index) {
    weights.push_back(at::full({8, 8}, index, at::kFloat).requires_grad_());
    plain.push_back(weights.back().detach().clone());
    tight.add(c10::str("w", index), weights.back());
  }
  tight.pages->on_arrival = [](size_t page) {
    std::this_thread::sleep_for(std::chrono::microseconds(page * 11));
  };
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      at::set_num_threads(1);
      for (int op = 0; op < kOperators; ++op) {
        const auto index = static_cast<size_t>(op * (thread + 1) + thread) % weights.size();
        const at::Tensor view = weights[index].t().narrow(0, 2, 3);
        const at::Tensor sum = at::matmul(view, at::ones({8, 8}));
        if (!at::equal(sum, at::matmul(plain[index].narrow(0, 2, 3), at::ones({8, 8})))) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST_F(TrapTest, FindsAPageThatOtherThreadsBringAndDrop) {
  std::atomic<bool> stop = false;
  std::atomic<int> wrong = 0;
  std::thread evictor([&] {
    while (!stop) paging_.pager->release_unpinned();
  });
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 2; ++thread) {
    threads.emplace_back([&, thread] {
      at::set_num_threads(1);
      const at::NoGradGuard no_grad;
      for (int op = 0; op < 20000; ++op) {
        const at::Tensor view = (op + thread) % 2 == 0 ? weight_.t() : weight_.view({24});
        if (view.device() != at::kCPU) ++wrong;
        if (op % 4 == 0 && !at::equal(view[0], plain_.view({24})[0]) && view.dim() == 1) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  stop = true;
  evictor.join();
  EXPECT_EQ(wrong, 0);
}

// ---- saving ----

// LibTorch's words, which zeropage/gathered_parameters.h quotes.
constexpr const char* kWordsOfSave =
    "Attempted to set the storage of a tensor on device \"cpu\" to a storage on different device "
    "\"meta\"";

TEST_F(TrapTest, RefusesToSaveAnEvictedModuleAndSavesItUnderPins) {
  const torch::nn::Sequential net(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2));
  std::vector<at::Tensor> expected;
  for (const auto& parameter : net->parameters()) expected.push_back(parameter.detach().clone());
  FakePaging paging;
  paging.add_parameters(net);
  {
    std::ostringstream stream;
    EXPECT_NE(error_of([&] { torch::save(net, stream); }).find(kWordsOfSave), std::string::npos);
  }
  {
    std::ostringstream stream;
    const at::Tensor parameter = net->parameters()[0];
    EXPECT_NE(error_of([&] { torch::save(parameter, stream); }).find(kWordsOfSave),
              std::string::npos);
    EXPECT_NE(error_of([&] { parameter.data_ptr<float>(); })
                  .find("The tensor has a non-zero number of elements, but its data is not "
                        "allocated yet"),
              std::string::npos);
    EXPECT_EQ(parameter.data_ptr(), nullptr);
  }
  std::stringstream stream;
  {
    const auto pins = keep(paging, {0, 1, 2, 3});
    torch::save(net, stream);
  }
  evict(paging);
  torch::nn::Sequential loaded(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2));
  torch::load(loaded, stream);
  EXPECT_TRUE(same_bits(expected, loaded->parameters()));
}

TEST_F(TrapTest, LoadsIntoAPagedModule) {
  const auto make = [] { return torch::nn::Sequential(torch::nn::Linear(4, 3)); };
  const auto saved = make();
  std::stringstream stream;
  torch::save(saved, stream);
  auto net = make();
  FakePaging paging;
  paging.add_parameters(net);
  EXPECT_THAT(error_of([&] { torch::load(net, stream); }),
              HasSubstr("aten::set_ of a sharded parameter"));
  {
    const at::NoGradGuard no_grad;
    for (size_t index = 0; index < 2; ++index) {
      net->parameters()[index].copy_(saved->parameters()[index]);
    }
  }
  evict(paging);
  EXPECT_TRUE(at::equal(net->parameters()[0], saved->parameters()[0]));
}

// ---- refusals ----

TEST_F(TrapTest, RefusesToResizeASharded) {
  const at::NoGradGuard no_grad;
  EXPECT_THAT(error_of([&] { weight_.resize_({2}); }),
              AllOf(HasSubstr("aten::resize_ of a sharded parameter of sizes [4, 6]"),
                    HasSubstr("belongs to its page")));
  EXPECT_THAT(error_of([&] {
                weight_.resize_as_(at::ones({9, 9}));
              }),
              HasSubstr("aten::resize_as"));
  EXPECT_THAT(error_of([&] { weight_.detach().resize_({100}); }), HasSubstr("aten::resize_"));
  EXPECT_THAT(error_of([&] { weight_.set_(at::ones({2})); }), HasSubstr("aten::set_"));
  const auto pins = keep(paging_, {0});
  EXPECT_THAT(error_of([&] { weight_.set_(at::ones({2})); }), HasSubstr("aten::set_"));
  EXPECT_TRUE(at::equal(weight_, plain_)) << "it is as it was";
}

TEST_F(TrapTest, RefusesToGrowWithTheResultOfAnOperator) {
  const at::NoGradGuard no_grad;
  const at::Tensor large = at::ones({20, 20});
  at::Tensor row = weight_[0];
  EXPECT_THAT(error_of([&] { at::add_out(row, large, large); }),
              AllOf(HasSubstr("a result of 1600 bytes does not fit the sharded tensor"),
                    HasSubstr("belongs to its page")));
  row = weight_[0];
  EXPECT_THAT(error_of([&] { at::cat_out(row, {large, large}); }), HasSubstr("does not fit"));
  evict(paging_);
  EXPECT_FALSE(is_resident()) << "it left its page";
  EXPECT_TRUE(at::equal(weight_, plain_));
}

TEST_F(TrapTest, RefusesAnAliasThatNothingTraps) {
  EXPECT_NE(error_of([&] { at::empty({0}).set_(weight_.detach()); }), "");
}

TEST_F(TrapTest, RefusesToBecomeAnotherTensor) {
  at::Tensor weight = weight_;
  EXPECT_THAT(error_of([&] {
                weight.set_data(at::ones({4, 6}));
              }),
              AllOf(HasSubstr("set_data() or ->to() on a sharded parameter of sizes [4, 6]"),
                    HasSubstr("before wrapping it")));
  torch::nn::Linear linear(3, 2);
  FakePaging paging;
  paging.add_parameters(linear);
  EXPECT_THAT(error_of([&] { linear->to(at::kHalf); }), HasSubstr("set_data() or ->to()"));
  EXPECT_EQ(linear->weight.scalar_type(), at::kFloat);
  EXPECT_EQ(error_of([&] { linear->to(at::kFloat); }), "") << "it is that already";
  EXPECT_EQ(error_of([&] { linear->to(at::kCPU); }), "") << "it is there already";
  EXPECT_FALSE(at::matmul(linear->weight, linear->weight.t()).isnan().any().item<bool>());
}

TEST_F(TrapTest, RefusesToCloneAParameterUnlessItIsPinned) {
  EXPECT_THAT(error_of([&] { (void)weight_.clone(); }),
              AllOf(HasSubstr("clone() of a sharded parameter of sizes [4, 6]"),
                    HasSubstr("p.detach().clone()")));
  const torch::nn::Linear linear(3, 2);
  FakePaging paging;
  paging.add_parameters(linear);
  EXPECT_THAT(error_of([&] { (void)linear->clone(); }), HasSubstr("clone() of a sharded"));
  const auto all = keep(paging, {0, 1});
  const auto copy = std::dynamic_pointer_cast<torch::nn::LinearImpl>(linear->clone());
  EXPECT_FALSE(is_trapped(copy->weight));
  EXPECT_TRUE(same_bits({linear->weight.detach(), linear->bias.detach()}, copy->parameters()));
}

TEST_F(TrapTest, SaysSoWhenATensorOutlivedItsPager) {
  const at::Tensor weight = at::ones({2, 3}).requires_grad_();
  at::Tensor view, loss;
  {
    FakePaging paging;
    paging.add("weight", weight);
    view = weight.t();
    loss = (weight * weight).sum();
  }
  for (const auto& run : std::vector<std::function<void()>>{
           [&] { (void)(weight + 1); }, [&] { (void)view.sum(); }, [&] { loss.backward(); },
           [&] { (void)weight.clone(); }, [&] { std::ostringstream() << weight; }}) {
    EXPECT_THAT(error_of(run), HasSubstr("outlived the DistributedDataParallel"));
  }
}

}  // namespace
}  // namespace zeropage::paging::trap_test
