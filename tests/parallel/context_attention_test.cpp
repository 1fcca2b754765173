// Attention over sequences that are split over ranks, beside LibTorch's over the whole sequence; models that train with it, beside
// one rank; what travels, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "operators/operator_interceptor.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "zeropage/context_parallel.h"
#include "zeropage/zeropage.h"

namespace zeropage::context_attention_test {
namespace {

using namespace zeropage::testing;
using parallel::ContextAttentionOptions;
using parallel::ContextForm;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr int64_t kBatch = 2, kHeads = 4, kLength = 24, kHeadSize = 8;

struct Case {
  ContextForm form;
  int ranks;
  bool is_causal;
  int64_t key_heads;
  bool has_documents;
  torch::Dtype dtype;
};

std::string name_of(const ::testing::TestParamInfo<Case>& info) {
  const Case& of = info.param;
  return c10::str(of.form == ContextForm::kRing ? "Ring" : "Ulysses", "On", of.ranks, "Ranks",
                  of.is_causal ? "Causal" : "Full", of.key_heads, "KeyHeads",
                  of.has_documents ? "Packed" : "", c10::toString(of.dtype));
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const ContextForm form : {ContextForm::kRing, ContextForm::kUlysses}) {
    for (const int ranks : {1, 2, 3, 4}) {
      if (form == ContextForm::kUlysses && kHeads % ranks != 0) continue;
      for (const bool is_causal : {true, false}) {
        for (const bool has_documents : {false, true}) {
          all.push_back({form, ranks, is_causal, kHeads, has_documents, torch::kFloat64});
        }
        all.push_back({form, ranks, is_causal, 1, false, torch::kFloat64});
        all.push_back({form, ranks, is_causal, 2, true, torch::kFloat32});
      }
      all.push_back({form, ranks, true, 2, false, torch::kFloat32});
      all.push_back({form, ranks, true, 2, false, torch::kBFloat16});
    }
  }
  return all;
}

struct Whole {
  torch::Tensor query, key, value, documents, gradient;
};

Whole whole_of(const Case& of) {
  torch::manual_seed(7);
  const auto options = torch::TensorOptions().dtype(torch::kFloat64);
  const auto heads = [&](int64_t count) {
    return torch::randn({kBatch, count, kLength, kHeadSize}, options).to(of.dtype);
  };
  Whole whole{heads(kHeads), heads(of.key_heads), heads(of.key_heads), {}, heads(kHeads)};
  if (of.has_documents) {
    // Documents of 7 and 17 tokens in one sample, of 1, 11 and 12 in the other.
    const auto run = [](int64_t document, int64_t tokens) {
      return torch::full({tokens}, document, torch::kLong);
    };
    whole.documents = torch::stack(
        {torch::cat({run(3, 7), run(1, 17)}), torch::cat({run(5, 1), run(6, 11), run(5, 12)})});
  }
  return whole;
}

// In double, by LibTorch.
torch::Tensor attend_plainly(const Whole& of, const torch::Tensor& query, const torch::Tensor& key,
                             const torch::Tensor& value, bool is_causal) {
  torch::Tensor allowed = torch::ones({kLength, kLength}, torch::kBool);
  if (is_causal) allowed = allowed.tril();
  allowed = allowed.view({1, 1, kLength, kLength});
  if (of.documents.defined()) {
    allowed = allowed & (of.documents.unsqueeze(2) == of.documents.unsqueeze(1)).unsqueeze(1);
  }
  return at::scaled_dot_product_attention(query, key, value, allowed, 0, false, std::nullopt,
                                          /*enable_gqa=*/true);
}

double tolerance_of(torch::Dtype dtype) {
  return dtype == torch::kFloat64 ? 1e-13 : dtype == torch::kFloat32 ? 4e-6 : 6e-2;
}

void expect_close(const torch::Tensor& ours, const torch::Tensor& plain, const char* what,
                  torch::Dtype dtype) {
  const double off = (ours.to(torch::kFloat64) - plain).abs().max().item<double>();
  EXPECT_LT(off, tolerance_of(dtype)) << what;
}

class ContextAttentionTest : public ::testing::TestWithParam<Case> {};

TEST_P(ContextAttentionTest, AndItsGradientsAreThoseOfTheWholeSequence) {
  const Case& of = GetParam();
  const Whole whole = whole_of(of);
  run_ranks(of.ranks, [&](World& world) {
    const auto leaf = [](const torch::Tensor& from) {
      return from.to(torch::kFloat64, false, /*copy=*/true).requires_grad_();
    };
    const torch::Tensor query = leaf(whole.query), key = leaf(whole.key), value = leaf(whole.value);
    const torch::Tensor plain = attend_plainly(whole, query, key, value, of.is_causal);
    plain.backward(whole.gradient.to(torch::kFloat64));

    const auto part = [&](const torch::Tensor& all) {
      return parallel::split_context(all, 2, world).detach().requires_grad_();
    };
    const torch::Tensor q = part(whole.query), k = part(whole.key), v = part(whole.value);
    ContextAttentionOptions options{.is_causal = of.is_causal, .form = of.form};
    if (of.has_documents) options.documents = parallel::split_context(whole.documents, 1, world);
    const torch::Tensor ours = parallel::context_attention(q, k, v, world, options);
    ours.backward(parallel::split_context(whole.gradient, 2, world));

    const auto of_rank = [&](const torch::Tensor& all) {
      return parallel::split_context(all, 2, world);
    };
    expect_close(ours, of_rank(plain), "output", of.dtype);
    expect_close(q.grad(), of_rank(query.grad()), "gradient of queries", of.dtype);
    expect_close(k.grad(), of_rank(key.grad()), "gradient of keys", of.dtype);
    expect_close(v.grad(), of_rank(value.grad()), "gradient of values", of.dtype);
  });
}

INSTANTIATE_TEST_SUITE_P(Forms, ContextAttentionTest, ::testing::ValuesIn(cases()), name_of);

TEST(ContextSplitTest, GivesEachRankTwoChunksAndBringsThemBack) {
  run_ranks(2, [](World& world) {
    const torch::Tensor whole = torch::arange(16).view({1, 8, 2});
    const torch::Tensor part = parallel::split_context(whole, 1, world);
    const std::vector<int64_t> expected =
        world.rank() == 0 ? std::vector<int64_t>{0, 1, 6, 7} : std::vector<int64_t>{2, 3, 4, 5};
    const torch::Tensor positions = parallel::context_positions(8, world);
    EXPECT_TRUE(torch::equal(positions, torch::tensor(expected)));
    EXPECT_TRUE(torch::equal(part, whole.index_select(1, positions)));
    EXPECT_TRUE(torch::equal(parallel::gather_context(part, 1, world), whole));
    EXPECT_TRUE(torch::equal(parallel::gather_context(part, -2, world), whole));
  });
}

// ---- training ----

constexpr int64_t kTokens = 11, kWidth = 16;

struct BlockImpl : torch::nn::Module {
  // context: null for attention over the whole sequence on one rank.
  BlockImpl(const World* context, ContextForm form, bool is_marked)
      : context(context), form(form), is_marked(is_marked) {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    qkv = register_module("qkv", torch::nn::Linear(kWidth, 3 * kWidth));
    out = register_module("out", torch::nn::Linear(kWidth, kWidth));
    up = register_module("up", torch::nn::Linear(kWidth, 4 * kWidth));
    down = register_module("down", torch::nn::Linear(4 * kWidth, kWidth));
  }
  torch::Tensor forward(torch::Tensor x) {
    const auto parts = qkv(norm(x)).chunk(3, -1);
    const auto heads = [&](const torch::Tensor& of) {
      return of.view({of.size(0), of.size(1), kHeads, -1}).transpose(1, 2);
    };
    const torch::Tensor q = heads(parts[0]), k = heads(parts[1]), v = heads(parts[2]);
    const torch::Tensor mixed =
        context == nullptr || is_marked
            ? torch::scaled_dot_product_attention(q, k, v, {}, 0, true)
            : parallel::context_attention(q, k, v, *context, {.is_causal = true, .form = form});
    x = x + out(mixed.transpose(1, 2).flatten(2));
    return x + down(torch::gelu(up(x)));
  }
  const World* context;
  const ContextForm form;
  const bool is_marked;  // calls LibTorch's attention, and is marked
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

struct Setting {
  Stage stage = Stage::kReplicated;
  ContextForm form = ContextForm::kRing;
  enum { kKept, kRegions, kRecompute } activations = kKept;
  torch::Dtype dtype = torch::kFloat64;
  bool is_marked = false;
};

struct TinyGptImpl : torch::nn::Module {
  TinyGptImpl(const World* context, const Setting& setting) : setting(setting), context(context) {
    tokens = register_module("tokens", torch::nn::Embedding(kTokens, kWidth));
    places = register_module("places", torch::nn::Embedding(kLength, kWidth));
    for (int layer = 0; layer < 2; ++layer)
      blocks->push_back(Block(context, setting.form, setting.is_marked));
    register_module("blocks", blocks);
    head = register_module("head", torch::nn::Linear(kWidth, kTokens));
  }
  torch::Tensor forward(const torch::Tensor& ids, const torch::Tensor& targets) {
    const torch::Tensor positions = context == nullptr
                                        ? torch::arange(kLength)
                                        : parallel::context_positions(kLength, *context);
    torch::Tensor x = tokens(ids) + places(positions);
    for (const auto& module : *blocks) {
      auto block = std::static_pointer_cast<BlockImpl>(module);
      x = setting.activations == Setting::kRegions
              ? checkpoint([block](const torch::Tensor& at) { return block->forward(at); }, x)
              : block->forward(x);
    }
    return torch::nn::functional::cross_entropy(head(x).flatten(0, 1), targets.flatten());
  }
  const Setting setting;
  const World* const context;
  torch::nn::Embedding tokens{nullptr}, places{nullptr};
  torch::nn::ModuleList blocks;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(TinyGpt);

TinyGpt made(const World* context, const Setting& setting) {
  TinyGpt gpt(context, setting);
  // Ranks are threads, which share the default generator.
  auto generator = at::detail::createCPUGenerator(3);
  const torch::NoGradGuard no_grad;
  for (torch::Tensor& parameter : gpt->parameters()) parameter.normal_(0, 0.1, generator);
  gpt->to(setting.dtype);
  return gpt;
}

// Samples of a step: the same for all ranks. [samples, length + 1]
torch::Tensor batch_of(int step, int64_t samples) {
  auto generator = at::detail::createCPUGenerator(100 + step);
  return torch::randint(kTokens, {samples, kLength + 1}, generator,
                        torch::TensorOptions().dtype(torch::kLong));
}

constexpr int kSteps = 5;

struct Trained {
  std::vector<double> losses;
  std::vector<torch::Tensor> weights;
};

Trained train_on_one_rank(int64_t samples) {
  const TinyGpt gpt = made(nullptr, {});
  TinyGpt model = gpt;
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  Trained trained;
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor batch = batch_of(step, samples);
    const torch::Tensor loss = model->forward(batch.slice(1, 0, kLength), batch.slice(1, 1));
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    trained.losses.push_back(loss.item<double>());
  }
  for (const torch::Tensor& parameter : model->parameters()) {
    trained.weights.push_back(parameter.detach().clone());
  }
  return trained;
}

// data: ranks along that axis, each with its own samples.
void expect_trains_as_one_rank(int data, int context, const Setting& setting) {
  const Trained plain = train_on_one_rank(/*samples=*/2 * data);
  run_ranks(data * context, [&](World& world) {
    const Mesh mesh(world, {{"data", data}, {"context", context}});
    Options options;
    options.stage = setting.stage;
    options.page_bytes = 4096;
    options.minimum_sharded_bytes = 0;
    const TinyGpt gpt = made(&mesh["context"], setting);
    if (setting.is_marked) parallel::context_parallel(gpt, mesh["context"], setting.form);
    DistributedDataParallel model(gpt, mesh, options);
    zeropage::Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(1e-2));
    Recompute recompute(RecomputeOptions::selective());
    const double tolerance = setting.dtype == torch::kFloat64 ? 1e-11 : 2e-5;
    for (int step = 0; step < kSteps; ++step) {
      const torch::Tensor batch =
          batch_of(step, 2 * data).narrow(0, 2 * mesh["data"].rank(), 2).contiguous();
      const auto part = [&](const torch::Tensor& all) {
        return parallel::split_context(all, 1, mesh["context"]);
      };
      torch::Tensor loss;
      {
        std::optional<ActivationScope> scope;
        if (setting.activations == Setting::kRecompute) scope.emplace(recompute);
        loss = model(part(batch.slice(1, 0, kLength)), part(batch.slice(1, 1)));
      }
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      const double mean = world.sum(loss.item<double>()) / world.size();
      EXPECT_NEAR(mean, plain.losses[static_cast<size_t>(step)], tolerance) << "step " << step;
    }
    size_t index = 0;
    visit_parameters(model, [&](const std::string& name, const torch::Tensor& values) {
      const torch::Tensor& expected = plain.weights[index++];
      EXPECT_LT(
          (values.to(torch::kFloat64) - expected.to(torch::kFloat64)).abs().max().item<double>(),
          10 * tolerance)
          << name;
    });
    EXPECT_EQ(index, plain.weights.size());
  });
}

class ContextTrainingTest : public ::testing::TestWithParam<int> {
 protected:
  static Stage stage() {
    const std::array stages = {Stage::kReplicated, Stage::kOptimizerState, Stage::kGradients,
                               Stage::kParameters};
    return stages[static_cast<size_t>(GetParam())];
  }
};

TEST_P(ContextTrainingTest, IsThatOfOneRankWhateverTheFormAndWhatIsKept) {
  for (const ContextForm form : {ContextForm::kRing, ContextForm::kUlysses}) {
    for (const auto activations : {Setting::kKept, Setting::kRegions, Setting::kRecompute}) {
      for (const bool is_marked : {false, true}) {
        SCOPED_TRACE(c10::str("form ", static_cast<int>(form), ", activations ",
                              static_cast<int>(activations), is_marked ? ", marked" : ""));
        expect_trains_as_one_rank(1, 2, {stage(), form, activations, torch::kFloat64, is_marked});
      }
    }
  }
}

TEST_P(ContextTrainingTest, OfTwoSamplesOnFourRanksIsThatOfOneRank) {
  expect_trains_as_one_rank(2, 2, {stage()});
  expect_trains_as_one_rank(1, 4, {stage()});
  expect_trains_as_one_rank(
      1, 4, {stage(), ContextForm::kRing, Setting::kRegions, torch::kFloat64, true});
  expect_trains_as_one_rank(2, 2,
                            {stage(), ContextForm::kUlysses, Setting::kKept, torch::kFloat32});
}

INSTANTIATE_TEST_SUITE_P(Stages, ContextTrainingTest, ::testing::Range(0, 4));

// ---- what travels and stays ----

TEST(ContextTrafficTest, OfARingIsABlockOfKeysAndValuesATurn) {
  for (const int ranks : {2, 3, 4}) {
    run_ranks(ranks, [&](World& world) {
      const int64_t length = 8;
      const auto heads = [&](int64_t count) {
        return torch::ones({1, count, length, kHeadSize}, torch::kBFloat16).requires_grad_();
      };
      const torch::Tensor q = heads(4), k = heads(2), v = heads(2);
      const auto sent = [&] { return world.communicator().wire_traffic().pair; };
      const int64_t numel = 2 * k.numel();
      const auto before = sent();
      const torch::Tensor y = parallel::context_attention(q, k, v, world, {.is_causal = true});
      const auto forward = sent();
      y.sum().backward();
      const auto backward = sent();
      EXPECT_EQ(forward.bytes - before.bytes, (ranks - 1) * (numel * 2 + 8))
          << "and 8 bytes that ranks compare";
      EXPECT_EQ(backward.bytes - forward.bytes, (ranks - 1) * (numel * 2 + 8) + ranks * numel * 4)
          << "blocks in bf16, and their gradients in fp32";
      EXPECT_EQ(backward.messages - before.messages, 2 * (ranks - 1) + ranks);
    });
  }
}

// What a forward keeps for its backward.
int64_t activation_bytes(int context) {
  int64_t kept_bytes = 0;
  run_ranks(context, [&](World& world) {
    const Mesh mesh(world, {{"data", 1}, {"context", context}});
    const TinyGpt gpt = made(&mesh["context"], {.dtype = torch::kFloat32, .is_marked = true});
    parallel::context_parallel(gpt, mesh["context"]);
    DistributedDataParallel model(gpt, mesh, {});
    const torch::Tensor batch = batch_of(0, 16);
    const auto part = [&](const torch::Tensor& all) {
      return parallel::split_context(all, 1, mesh["context"]);
    };
    const torch::Tensor ids = part(batch.slice(1, 0, kLength)), targets = part(batch.slice(1, 1));
    const int64_t before_bytes = Ledger::current()->now()[Kind::kActivation];
    const torch::Tensor loss = model(ids, targets);
    if (world.rank() == 0) {
      kept_bytes = Ledger::current()->now()[Kind::kActivation] - before_bytes;
    }
    loss.backward();
  });
  return kept_bytes;
}

TEST(ContextMemoryTest, OfActivationsIsAsManyTimesSmallerAsThereAreRanks) {
  const auto whole = static_cast<double>(activation_bytes(1));
  EXPECT_NEAR(static_cast<double>(activation_bytes(2)) / whole, 0.5, 0.02);
  EXPECT_NEAR(static_cast<double>(activation_bytes(4)) / whole, 0.25, 0.02);
}

// ---- what is refused ----

torch::Tensor heads_of(int64_t count, int64_t length, torch::Dtype dtype = torch::kFloat) {
  return torch::ones({1, count, length, 4}, dtype);
}

TEST(ContextRefusalTest, NamesWhatDoesNotFit) {
  run_ranks(2, [](World& world) {
    const auto attend = [&](const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v,
                            ContextAttentionOptions options = {}) {
      return error_of([&] { parallel::context_attention(q, k, v, world, options); });
    };
    const torch::Tensor q = heads_of(3, 4);
    EXPECT_THAT(attend(q[0], q[0], q[0]), HasSubstr("expected query, key and value [batch, heads"));
    EXPECT_THAT(attend(q, heads_of(2, 4), heads_of(2, 4)), HasSubstr("divides its 3"));
    EXPECT_THAT(attend(q, heads_of(3, 6), heads_of(3, 6)), HasSubstr("of the query's sizes"));
    EXPECT_THAT(attend(heads_of(3, 5), heads_of(3, 5), heads_of(3, 5)),
                HasSubstr("split the sequence by split_context()"));
    EXPECT_THAT(attend(q, q.to(torch::kDouble), q), HasSubstr("in one of fp64, fp32"));
    EXPECT_THAT(attend(q, q, q, {.documents = torch::zeros({1, 3}, torch::kLong)}),
                HasSubstr("documents: expected integers [1, 4]"));
    EXPECT_THAT(attend(q, q, q, {.form = ContextForm::kUlysses}),
                HasSubstr("expected a number of heads that its 2 ranks divide, got 3; use "
                          "ContextForm::kRing"));
    EXPECT_THAT(error_of([&] {
                  parallel::split_context(torch::ones({1, 6}), 1, world);
                }),
                HasSubstr("expected a length that is a multiple of 4"));
  });
}

// What the ranks' calls end with where one differs.
std::string error_of_ranks(const std::function<void(World& world)>& attend) {
  return error_of([&] { run_ranks(2, [&](World& world) { attend(world); }); });
}

TEST(ContextRefusalTest, OfRanksThatDifferNamesBoth) {
  for (const ContextForm form : {ContextForm::kRing, ContextForm::kUlysses}) {
    EXPECT_THAT(error_of_ranks([&](World& world) {
                  const torch::Tensor q = heads_of(2, world.rank() == 0 ? 4 : 6);
                  parallel::context_attention(q, q, q, world, {.form = form});
                }),
                AllOf(HasSubstr("[1, 2, 4, 4]"), HasSubstr("[1, 2, 6, 4]")));
    EXPECT_THAT(error_of_ranks([&](World& world) {
                  const torch::Tensor q = heads_of(2, 4);
                  parallel::context_attention(q, q, q, world,
                                              {.is_causal = world.rank() == 0, .form = form});
                }),
                HasSubstr("causal"));
    EXPECT_THAT(error_of_ranks([&](World& world) {
                  const torch::Tensor q = heads_of(2, 4);
                  parallel::context_attention(
                      q, q, q, world, {.scale = world.rank() == 0 ? 0.5 : 0.25, .form = form});
                }),
                AnyOf(HasSubstr("another dtype or scale"), HasSubstr("scale 0.25")));
  }
}

TEST(ContextRefusalTest, OfRanksThatReadOtherSamplesNamesOne) {
  for (const ContextForm form : {ContextForm::kRing, ContextForm::kUlysses}) {
    EXPECT_THAT(error_of_ranks([&](World& world) {
                  // A sampler that goes by the rank of the world.
                  const torch::Tensor batch = torch::full({1, 2, 8, 4}, 1.0 + world.rank());
                  const torch::Tensor q = parallel::split_context(batch, 2, world);
                  parallel::context_attention(q, q, q, world, {.form = form});
                }),
                AnyOf(HasSubstr("another batch"), HasSubstr("after a split of #")));
  }
}

struct AnyAttentionImpl : torch::nn::Module {
  explicit AnyAttentionImpl(std::function<torch::Tensor(torch::Tensor)> attend)
      : attend(std::move(attend)) {
    linear = register_module("linear", torch::nn::Linear(4, 4));
  }
  torch::Tensor forward(const torch::Tensor& x) { return attend(linear(x)); }
  const std::function<torch::Tensor(torch::Tensor)> attend;
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(AnyAttention);

TEST(ContextRefusalTest, OfAttentionThatIsNotSplit) {
  run_ranks(2, [](World& world) {
    const auto error_with = [&](std::function<torch::Tensor(torch::Tensor)> attend) {
      const AnyAttention module(std::move(attend));
      parallel::context_parallel(module, world);
      DistributedDataParallel model(module, world, {});
      return error_of([&] { model(heads_of(2, 4)); });
    };
    const auto attention = [](const torch::Tensor& x, const torch::Tensor& k,
                              const std::optional<torch::Tensor>& mask, double dropout) {
      return torch::scaled_dot_product_attention(x, k, k, mask, dropout, false);
    };
    EXPECT_THAT(error_with([&](const torch::Tensor& x) {
                  return attention(x, x, torch::ones({4, 4}, torch::kBool), 0);
                }),
                HasSubstr("expected no mask but is_causal"));
    EXPECT_THAT(error_with([&](const torch::Tensor& x) { return attention(x, x, {}, 0.1); }),
                HasSubstr("expected no dropout of weights, got 0.1"));
    EXPECT_THAT(
        error_with([&](const torch::Tensor& x) { return attention(x, heads_of(2, 8), {}, 0); }),
        HasSubstr("expected keys of the queries' own tokens"));
    EXPECT_THAT(error_with([&](const torch::Tensor& x) {
                  return torch::matmul(torch::softmax(torch::matmul(x, x.mT()), -1), x);
                }),
                HasSubstr("ran no scaled_dot_product_attention"));
    EXPECT_THAT(error_with([&](const torch::Tensor& x) { return attention(x, x, {}, 0); }), "");
    const AnyAttention module([&](const torch::Tensor& x) { return attention(x, x, {}, 0); });
    parallel::context_parallel(module, world);
    DistributedDataParallel model(module, world, {});
    model(heads_of(2, 4)).sum().backward();
    EXPECT_THAT(error_of([&] { module.ptr()->forward(heads_of(2, 4)).sum().backward(); }),
                HasSubstr("call the wrapped model, model(x), and not the module"));
    EXPECT_EQ(operators::current_replacement(), nullptr) << "an error ends what is replaced";
  });
}

// A backward need not follow a forward of its own.
TEST(ContextRefusalTest, IsNotOfTwoBackwardsOfAGraphNorOfTwoForwardsBeforeTheirBackwards) {
  run_ranks(2, [](World& world) {
    const AnyAttention module([](const torch::Tensor& x) {
      return torch::scaled_dot_product_attention(x, x, x, {}, 0, true);
    });
    parallel::context_parallel(module, world);
    DistributedDataParallel model(module, world, {});
    const torch::Tensor kept = model(heads_of(2, 4)).sum();
    kept.backward({}, /*retain_graph=*/true);
    EXPECT_THAT(error_of([&] { kept.backward(); }), "");
    zeropage::Optimizer<torch::optim::SGD> optimizer(model, torch::optim::SGDOptions(0.1));
    optimizer.zero_grad();
    module->linear->weight.mutable_grad() = torch::ones({4, 4});
    EXPECT_THAT(error_of([&] { optimizer.step(); }), "") << "what is averaged without a backward";
    const torch::Tensor first = model(heads_of(2, 4)).sum(), second = model(heads_of(2, 4)).sum();
    EXPECT_THAT(error_of([&] { first.backward(); }), "");
    EXPECT_THAT(error_of([&] { second.backward(); }), "");
    EXPECT_THAT(error_of([&] { module.ptr()->forward(heads_of(2, 4)).sum().backward(); }),
                HasSubstr("call the wrapped model, model(x), and not the module"));
  });
  // No gradient comes to attention where what is behind it alone is trained.
  run_ranks(2, [](World& world) {
    const torch::nn::Linear head(4, 1);
    torch::nn::Sequential module(torch::nn::Functional([](const torch::Tensor& x) {
                                   return torch::scaled_dot_product_attention(x, x, x, {}, 0, true);
                                 }),
                                 head);
    parallel::context_parallel(module, world);
    DistributedDataParallel model(module, world, {});
    const torch::Tensor first = model(heads_of(2, 4)).sum(), second = model(heads_of(2, 4)).sum();
    EXPECT_THAT(error_of([&] { first.backward(); }), "");
    EXPECT_THAT(error_of([&] { second.backward(); }), "");
  });
}

TEST(ContextRefusalTest, OfAWrapperThatDoesNotAverageOverTheAxis) {
  run_ranks(4, [](World& world) {
    const Mesh mesh(world, {{"data", 2}, {"context", 2}});
    const auto error_over = [&](const auto& ranks) {
      DistributedDataParallel model(AnyAttention([&](const torch::Tensor& x) {
                                      return parallel::context_attention(x, x, x, mesh["context"]);
                                    }),
                                    ranks, Options());
      return error_of([&] { model(heads_of(2, 4)); });
    };
    EXPECT_THAT(error_over(mesh["data"]), AllOf(HasSubstr("over 2 ranks without it along \"data\""),
                                                HasSubstr("wrap the model over the mesh")));
    EXPECT_EQ(error_over(mesh), "");
    EXPECT_EQ(error_over(world), "");
    // What nothing wraps is not known.
    parallel::context_attention(heads_of(2, 4), heads_of(2, 4), heads_of(2, 4), mesh["context"]);
  });
}

TEST(ContextRefusalTest, OfMarksOnOtherModulesThanTheWrappedOne) {
  run_ranks(2, [](World& world) {
    const Mesh mesh(world, {{"data", 1}, {"context", 2}});
    const auto attend = [](torch::Tensor x) { return x; };
    AnyAttention inner(attend);
    torch::nn::Sequential outer(inner);
    parallel::context_parallel(inner, mesh["context"]);
    EXPECT_THAT(error_of([&] { DistributedDataParallel(outer, mesh, Options()); }),
                HasSubstr("marked module \"0\" and not the module that is wrapped"));
    EXPECT_THAT(error_of([&] { parallel::context_parallel(outer, mesh["context"]); }),
                HasSubstr("module \"0\" is marked already"));
    AnyAttention other(attend);
    parallel::context_parallel(other, mesh["data"]);
    EXPECT_THAT(error_of([&] { DistributedDataParallel(other, mesh, Options()); }),
                HasSubstr("over 1 ranks that are no axis \"context\" of the mesh"));
    torch::nn::Sequential encoder(torch::nn::MultiheadAttention(4, 2));
    EXPECT_THAT(error_of([&] { parallel::context_parallel(encoder, mesh["context"]); }),
                HasSubstr("module \"0\" is a torch::nn::MultiheadAttention"));
    EXPECT_THAT(error_of([&] { parallel::ContextScope scope(*outer); }),
                HasSubstr("the module is not marked"));
  });
}

TEST(ContextScopeTest, GivesAPlainForwardTheAttentionOfAllRanks) {
  const torch::Tensor whole = torch::linspace(-1, 1, 64).view({1, 2, 8, 4});
  const torch::Tensor plain = at::scaled_dot_product_attention(whole, whole, whole, {}, 0, true);
  run_ranks(2, [&](World& world) {
    torch::nn::Sequential module(torch::nn::Functional([](const torch::Tensor& x) {
      return at::scaled_dot_product_attention(x, x, x, {}, 0, true);
    }));
    parallel::context_parallel(module, world);
    const torch::Tensor part = parallel::split_context(whole, 2, world);
    torch::Tensor mixed;
    {
      const parallel::ContextScope scope(*module);
      mixed = module->forward(part);
    }
    EXPECT_TRUE(torch::allclose(mixed, parallel::split_context(plain, 2, world), 1e-5, 1e-6));
    EXPECT_FALSE(torch::allclose(module->forward(part), mixed, 1e-5, 1e-6));
  });
}

}  // namespace
}  // namespace zeropage::context_attention_test
