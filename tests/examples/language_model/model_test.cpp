// examples/language_model/model: what the modules compute, and their names.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "examples/language_model/model/language_model.h"
#include "tests/examples/language_model/small_models.h"
#include "tests/harness/errors.h"

namespace zeropage::model_test {
namespace {

using namespace language_model;
using namespace zeropage::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;

std::vector<std::string> names_of(const LanguageModel& model) {
  std::vector<std::string> names;
  for (const auto& parameter : model.named_parameters()) names.push_back(parameter.key());
  return names;
}

TEST(LanguageModelTest, HasHuggingFacesNames) {
  EXPECT_THAT(
      names_of(*make_model(small_llama())),
      IsSupersetOf({"model.embed_tokens.weight", "model.layers.0.input_layernorm.weight",
                    "model.layers.0.self_attn.q_proj.weight",
                    "model.layers.2.self_attn.o_proj.weight",
                    "model.layers.0.post_attention_layernorm.weight",
                    "model.layers.0.mlp.gate_proj.weight", "model.norm.weight", "lm_head.weight"}));
  const auto gpt2 = make_model(small_gpt2());
  EXPECT_THAT(
      names_of(*gpt2),
      IsSupersetOf({"transformer.wte.weight", "transformer.wpe.weight",
                    "transformer.h.0.ln_1.weight", "transformer.h.0.attn.c_attn.weight",
                    "transformer.h.1.mlp.c_proj.bias", "transformer.ln_f.bias", "lm_head.weight"}));
  // The layout of Conv1D.
  EXPECT_EQ(gpt2->named_parameters()["transformer.h.0.attn.c_attn.weight"].sizes(),
            (std::vector<int64_t>{24, 72}));
}

// Attention by its definition, one query after the other.
torch::Tensor attention_by_hand(const torch::Tensor& q, const torch::Tensor& k,
                                const torch::Tensor& v) {
  torch::Tensor out = torch::zeros_like(q);
  const int64_t shared_by = q.size(1) / k.size(1);
  for (int64_t head = 0; head < q.size(1); ++head) {
    for (int64_t i = 0; i < q.size(2); ++i) {
      const torch::Tensor keys = k[0][head / shared_by].slice(0, 0, i + 1);
      const torch::Tensor scores =
          keys.mv(q[0][head][i]) / std::sqrt(static_cast<double>(q.size(3)));
      out[0][head][i] = torch::softmax(scores, 0).matmul(v[0][head / shared_by].slice(0, 0, i + 1));
    }
  }
  return out.transpose(1, 2).reshape({1, q.size(2), -1});
}

TEST(LanguageModelTest, AttentionSharesHeadsOfKeysAmongNeighbours) {
  torch::manual_seed(1);
  const torch::Tensor q = torch::randn({1, 6, 9, 4}), k = torch::randn({1, 2, 9, 4});
  const torch::Tensor v = torch::randn({1, 2, 9, 4});
  EXPECT_TRUE(torch::allclose(attention(q, k, v, {}), attention_by_hand(q, k, v), 1e-5, 1e-6));
  // The last token alone, as generation asks.
  EXPECT_TRUE(torch::allclose(attention(q.slice(2, 8), k, v, {}),
                              attention_by_hand(q, k, v).slice(1, 8), 1e-5, 1e-6));
}

TEST(LanguageModelTest, RotatesElementIWithElementIPlusHalf) {
  const ModelConfig config = small_llama();
  const RotaryAngles angles = rotary_angles(config, torch::arange(5).unsqueeze(0));
  torch::manual_seed(1);
  const torch::Tensor x = torch::randn({1, 1, 5, 8}),
                      y = zeropage::fused::rotary(x, angles.cos, angles.sin);
  for (int64_t position = 0; position < 5; ++position) {
    for (int64_t i = 0; i < 4; ++i) {
      const double angle = static_cast<double>(position) * std::pow(10000.0, -2.0 * i / 8);
      const double a = x[0][0][position][i].item<double>();
      const double b = x[0][0][position][i + 4].item<double>();
      EXPECT_NEAR(y[0][0][position][i].item<double>(), a * std::cos(angle) - b * std::sin(angle),
                  1e-5);
      EXPECT_NEAR(y[0][0][position][i + 4].item<double>(),
                  b * std::cos(angle) + a * std::sin(angle), 1e-5);
    }
  }
}

TEST(LanguageModelTest, ATokenDoesNotSeeThoseBehindIt) {
  for (const ModelConfig& config : small_configs()) {
    SCOPED_TRACE(name_of(config.architecture));
    const auto model = drawn(config);
    model->eval();
    const torch::Tensor tokens = random_tokens(config, 2, 12);
    torch::Tensor changed = tokens.clone();
    changed.slice(1, 7) = (changed.slice(1, 7) + 1).remainder(config.vocabulary);
    const torch::Tensor before = model->logits(tokens), after = model->logits(changed);
    EXPECT_TRUE(torch::allclose(before.slice(1, 0, 7), after.slice(1, 0, 7), 1e-5, 1e-6));
    EXPECT_FALSE(torch::allclose(before.slice(1, 7), after.slice(1, 7), 1e-2, 1e-3));
  }
}

TEST(LanguageModelTest, PackedDocumentsHaveTheLossesOfEachAlone) {
  for (const ModelConfig& config : small_configs()) {
    SCOPED_TRACE(name_of(config.architecture));
    const auto model = drawn(config);
    model->eval();
    const torch::Tensor tokens = random_tokens(config, 2, 20);
    torch::Tensor documents = torch::zeros({2, 20}, torch::kLong), targets = tokens.roll(-1, 1);
    // Cut at 5 and 11 in the first row, and at 9 in the second. A number may come again.
    documents[0].slice(0, 5, 11) = 1;
    documents[1].slice(0, 9) = 3;
    std::vector<torch::Tensor> ends = {targets[0][4], targets[0][10], targets[0][19], targets[1][8],
                                       targets[1][19]};
    for (torch::Tensor& end : ends) end.fill_(kIgnored);
    const double packed = model->forward(tokens, targets, documents).item<double>() * 35;
    double alone = 0;
    for (const auto& [row, begin, end] : std::vector<std::array<int64_t, 3>>{
             {0, 0, 5}, {0, 5, 11}, {0, 11, 20}, {1, 0, 9}, {1, 9, 20}}) {
      const auto part = [&](const torch::Tensor& of) {
        return of.slice(0, row, row + 1).slice(1, begin, end);
      };
      alone += model->forward(part(tokens), part(targets)).item<double>() *
               static_cast<double>(end - begin - 1);
    }
    EXPECT_NEAR(packed, alone, 1e-4);
    EXPECT_GT(std::abs(model->forward(tokens, targets).item<double>() * 35 - alone), 1e-2)
        << "documents that see each other have other losses";
  }
}

TEST(LanguageModelTest, BehindACacheTheLogitsAreThoseOfTheWholeSequence) {
  for (const ModelConfig& config : small_configs()) {
    SCOPED_TRACE(name_of(config.architecture));
    const auto model = drawn(config);
    model->eval();
    const torch::NoGradGuard no_grad;
    const torch::Tensor tokens = random_tokens(config, 2, 15);
    const torch::Tensor whole = model->logits(tokens);
    KeyValueCache cache(config.layers, 15);
    int64_t end = 0;
    for (const int64_t more : {4, 1, 1, 6, 3}) {
      const torch::Tensor next = model->next_logits(tokens.slice(1, end, end + more), cache);
      end += more;
      EXPECT_TRUE(torch::allclose(next, whole.select(1, end - 1), 1e-4, 1e-5)) << end;
    }
    EXPECT_THAT(error_of([&] { model->next_logits(tokens.slice(1, 0, 1), cache); }),
                HasSubstr("room for 15 tokens"));
  }
}

TEST(LanguageModelTest, RecomputedLayersHaveTheSameGradients) {
  for (const ModelConfig& config : small_configs()) {
    SCOPED_TRACE(name_of(config.architecture));
    const torch::Tensor tokens = random_tokens(config, 2, 12);
    std::vector<std::vector<torch::Tensor>> gradients;
    for (const auto every : {EveryBlocks::none(), EveryBlocks::each()}) {
      const auto model = drawn(config);
      model->recompute(every);
      model->forward(tokens, tokens.roll(-1, 1)).backward();
      gradients.emplace_back();
      for (const torch::Tensor& parameter : model->parameters()) {
        gradients.back().push_back(parameter.grad());
      }
    }
    for (size_t i = 0; i < gradients[0].size(); ++i) {
      EXPECT_TRUE(torch::equal(gradients[0][i], gradients[1][i])) << i;
    }
  }
}

TEST(LanguageModelTest, DrawsAsItsFieldDoes) {
  ModelConfig config = small_gpt2();
  config.width = 96;
  config.head_width = 32;
  config.mlp_width = 384;
  config.layers = 8;
  const auto model = make_model(config, {.seed = 3});
  const auto deviation = [&](const char* name) {
    return model->named_parameters()[name].std().item<double>();
  };
  EXPECT_NEAR(deviation("transformer.wte.weight"), 0.02, 0.002);
  EXPECT_NEAR(deviation("transformer.h.3.mlp.c_fc.weight"), 0.02, 0.001);
  EXPECT_NEAR(deviation("transformer.h.3.mlp.c_proj.weight"), 0.02 / 4, 0.0003);
  EXPECT_EQ(deviation("transformer.h.3.attn.c_attn.bias"), 0);
}

TEST(LanguageModelTest, RefusesSequencesThatAreTooLong) {
  const auto model = make_model(small_llama());
  EXPECT_THAT(error_of([&] {
                model->logits(torch::zeros({1, 33}, torch::kLong));
              }),
              HasSubstr("a sequence of 33 tokens is longer than the model's 32"));
}

TEST(LanguageModelTest, AnAdapterChangesNothingAtFirstAndEachGetsAGradientAndMoves) {
  for (const ModelConfig& config : small_configs()) {
    SCOPED_TRACE(name_of(config.architecture));
    const bool is_gpt2 = config.architecture == Architecture::kGpt2;
    const auto model = drawn(config);
    const torch::Tensor tokens = random_tokens(config, 2, 12), targets = tokens.roll(-1, 1);
    const double before = model->forward(tokens, targets).item<double>();
    const std::vector<std::string> layers =
        is_gpt2 ? std::vector<std::string>{"c_attn", "attn.c_proj", "c_fc"}
                : std::vector<std::string>{"q_proj", "k_proj", "v_proj", "o_proj", "down_proj"};
    model->add_adapters(layers, {.rank = 2, .alpha = 4});
    EXPECT_EQ(model->forward(tokens, targets).item<double>(), before);

    std::map<std::string, torch::Tensor> adapters;
    std::vector<torch::Tensor> trained;
    for (const auto& parameter : model->named_parameters()) {
      const bool is_adapter = parameter.key().find(".lora_") != std::string::npos;
      EXPECT_EQ(parameter.value().requires_grad(), is_adapter) << parameter.key();
      if (!is_adapter) continue;
      adapters[parameter.key()] = parameter.value().detach().clone();
      trained.push_back(parameter.value());
    }
    EXPECT_EQ(adapters.size(), 2 * layers.size() * static_cast<size_t>(config.layers));
    model->recompute(EveryBlocks::each());
    torch::optim::AdamW optimizer(trained, torch::optim::AdamWOptions(0.01).weight_decay(0));
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      model->forward(tokens, targets).backward();
      optimizer.step();
    }
    for (const auto& parameter : model->named_parameters()) {
      const auto adapter = adapters.find(parameter.key());
      if (adapter == adapters.end()) continue;
      ASSERT_TRUE(parameter.value().grad().defined()) << parameter.key();
      EXPECT_GT(parameter.value().grad().abs().max().item<double>(), 0) << parameter.key();
      EXPECT_FALSE(torch::equal(parameter.value(), adapter->second)) << parameter.key();
    }
    EXPECT_LT(model->forward(tokens, targets).item<double>(), before);
  }
}

TEST(LanguageModelTest, AnAdapterForALayerThatIsNotThereIsRefusedWithThoseThatAre) {
  const auto model = make_model(small_llama());
  EXPECT_THAT(error_of([&] {
                model->add_adapters({"q_proj", "c_attn"}, {});
              }),
              AllOf(HasSubstr("no layer \"c_attn\""),
                    HasSubstr("q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj")));
}

}  // namespace
}  // namespace zeropage::model_test
