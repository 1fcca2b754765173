// examples/language_model/model/config: shapes from Hugging Face's config.json.
#include "examples/language_model/model/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "examples/language_model/model/language_model.h"
#include "tests/examples/language_model/small_models.h"
#include "tests/harness/errors.h"

namespace zeropage::config_test {
namespace {

using namespace language_model;
using nlohmann::json;
using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;

ModelConfig of(const json& object) {
  return config_from_json(object, "config.json");
}

TEST(LanguageModelConfigTest, HasHuggingFacesDefaultsForWhatIsLeftOut) {
  const ModelConfig llama = of({{"model_type", "llama"}});
  EXPECT_EQ(llama.width, 4096);
  EXPECT_EQ(llama.mlp_width, 11008);
  EXPECT_EQ(llama.key_value_heads, 32);
  EXPECT_EQ(llama.head_width, 128);
  EXPECT_EQ(llama.context, 2048);
  EXPECT_FALSE(llama.tied_head);
  // Llama 2 7B's numbers, which are published.
  EXPECT_EQ(count_parameters(llama), 6'738'415'616);

  const ModelConfig mistral = of({{"model_type", "mistral"}});
  EXPECT_EQ(mistral.key_value_heads, 8);
  EXPECT_EQ(mistral.window, 4096);
  EXPECT_EQ(longest_sequence(mistral), 4096) << "a window is not cut into the mask";
  EXPECT_EQ(of({{"model_type", "mistral"}, {"sliding_window", nullptr}}).window, std::nullopt);

  const ModelConfig gpt2 = of({{"model_type", "gpt2"}});
  EXPECT_EQ(gpt2.mlp_width, 3072);
  EXPECT_TRUE(gpt2.tied_head);
  EXPECT_EQ(count_parameters(gpt2), 124'439'808);

  const ModelConfig qwen2 = of({{"model_type", "qwen2"}});
  EXPECT_TRUE(qwen2.query_bias);
  EXPECT_FALSE(qwen2.output_bias);
}

TEST(LanguageModelConfigTest, OfAnotherArchitectureIsRefusedWithThoseThatAreKnown) {
  EXPECT_THAT(error_of([] {
                of({{"model_type", "bert"}});
              }),
              AllOf(HasSubstr("config.json: model_type \"bert\" is not known"),
                    HasSubstr("llama, mistral, qwen2, gpt2")));
  EXPECT_THAT(error_of([] { of({{"hidden_size", 8}}); }), HasSubstr("model_type is missing"));
  EXPECT_THAT(error_of([] { of(json::array()); }), HasSubstr("expected a JSON object"));
}

TEST(LanguageModelConfigTest, NamesAllThatIsWrongAtOnce) {
  const std::string error = error_of([] {
    of({{"model_type", "llama"},
        {"hidden_size", "wide"},
        {"num_attention_heads", 12},
        {"num_key_value_heads", 5},
        {"hidden_act", "gelu"},
        {"rms_norm_eps", -1},
        {"tie_word_embeddings", 1},
        {"quantization_config", {{"bits", 4}}},
        {"rope_scaling", {{"rope_type", "yarn"}, {"factor", 4}}}});
  });
  for (const char* part :
       {"hidden_size: expected a whole number above 0, got \"wide\"",
        "hidden_size 4096 is no multiple of the 12 num_attention_heads",
        "12 is no multiple of num_key_value_heads 5", "hidden_act: expected \"silu\"",
        "rms_norm_eps: expected a number above 0", "tie_word_embeddings: expected true or false",
        "quantization_config", "\"yarn\" are not supported"}) {
    EXPECT_THAT(error, HasSubstr(part));
  }
}

TEST(LanguageModelConfigTest, FieldsOfModelsThatComputeOtherwiseAreRefusedByName) {
  const json llama = {{"model_type", "llama"}};
  const auto with = [&](const char* key, const json& value) {
    json config = llama;
    config[key] = value;
    return error_of([&] { of(config); });
  };
  for (const auto& [key, value] : std::vector<std::pair<const char*, json>>{
           {"embedding_multiplier", 12.0},
           {"residual_multiplier", 0.22},
           {"attention_multiplier", 0.0078125},
           {"logits_scaling", 8.0},
           {"final_logit_softcapping", 30.0},
           {"query_pre_attn_scalar", 256},
           {"num_local_experts", 8},
           {"sliding_window", 4096},
           {"no_rope_layers", {1, 1, 1, 0}},
           {"layer_types", {"sliding_attention", "full_attention"}}}) {
    EXPECT_THAT(with(key, value), HasSubstr(std::string("\n  ") + key)) << key;
  }
  for (const auto& [key, value] :
       std::vector<std::pair<const char*, json>>{{"embedding_multiplier", 1.0},
                                                 {"logits_scaling", 1},
                                                 {"final_logit_softcapping", nullptr},
                                                 {"sliding_window", nullptr},
                                                 {"no_rope_layers", {1, 1}},
                                                 {"layer_types", {"full_attention"}}}) {
    EXPECT_EQ(with(key, value), "") << key;
  }
}

TEST(LanguageModelConfigTest, OfMixturesHaveHuggingFacesDefaultsAndSizes) {
  const ModelConfig mixtral = of({{"model_type", "mixtral"}});
  EXPECT_EQ(mixtral.norm_epsilon, 1e-5);
  EXPECT_EQ(mixtral.rope_theta, 1e6);
  // Mixtral 8x7B's number, which is published.
  EXPECT_EQ(count_parameters(mixtral), 46'702'792'704);
  const ModelConfig qwen2 = of({{"model_type", "qwen2_moe"}});
  EXPECT_EQ(count_parameters(qwen2), 14'315'784'192) << "Qwen1.5-MoE-A2.7B";
  const ModelConfig qwen3 = of({{"model_type", "qwen3_moe"},
                                {"num_hidden_layers", 48},
                                {"head_dim", 128},
                                {"norm_topk_prob", true}});
  EXPECT_EQ(count_parameters(qwen3), 30'532'122'624) << "Qwen3-30B-A3B";
  const ModelConfig some =
      of({{"model_type", "qwen3_moe"}, {"decoder_sparse_step", 2}, {"mlp_only_layers", {3}}});
  EXPECT_FALSE(is_sparse(some, 0));
  EXPECT_TRUE(is_sparse(some, 1));
  EXPECT_FALSE(is_sparse(some, 3));
}

TEST(LanguageModelConfigTest, OfMixturesThatCannotBeAreRefusedInWords) {
  const auto error = [](json fields) {
    fields["model_type"] = fields.value("model_type", "qwen2_moe");
    return error_of([&] { of(fields); });
  };
  EXPECT_THAT(error({{"hidden_act", "gelu"}}), HasSubstr("hidden_act: expected \"silu\""));
  EXPECT_THAT(error({{"num_experts", 4}, {"num_experts_per_tok", 5}}),
              HasSubstr("num_experts_per_tok 5 is more than the 4 experts"));
  EXPECT_THAT(error({{"num_experts", 0}}), HasSubstr("num_experts: expected a whole number above"));
  EXPECT_THAT(error({{"decoder_sparse_step", 25}}), HasSubstr("leave no layer with experts"));
  EXPECT_THAT(error({{"router_aux_loss_coef", -1}}), HasSubstr("a number of 0 or more"));
  EXPECT_THAT(error({{"model_type", "mixtral"}, {"router_jitter_noise", 0.1}}),
              HasSubstr("router_jitter_noise: 0.1 is not supported"));
  EXPECT_THAT(error({{"model_type", "mixtral"}, {"sliding_window", 4096}}),
              HasSubstr("sliding_window"));
}

TEST(LanguageModelConfigTest, ReadsLlama3sPositionsUnderBothKeys) {
  const json scaling = {{"rope_type", "llama3"},
                        {"factor", 32.0},
                        {"low_freq_factor", 1.0},
                        {"high_freq_factor", 4.0},
                        {"original_max_position_embeddings", 8192}};
  const ModelConfig old =
      of({{"model_type", "llama"}, {"rope_theta", 500000.0}, {"rope_scaling", scaling}});
  json parameters = scaling;
  parameters["rope_theta"] = 500000.0;
  const ModelConfig now = of({{"model_type", "llama"}, {"rope_parameters", parameters}});
  EXPECT_EQ(old, now);
  EXPECT_EQ(now.rope_scaling->factor, 32);
  json part = scaling;
  part.erase("low_freq_factor");
  EXPECT_THAT(error_of([&] {
                of({{"model_type", "llama"}, {"rope_scaling", part}});
              }),
              HasSubstr("rope_scaling: low_freq_factor is missing"));
}

TEST(LanguageModelConfigTest, WrittenAndReadIsTheSame) {
  for (const ModelConfig& config : testing::all_small_configs()) {
    SCOPED_TRACE(name_of(config.architecture));
    EXPECT_EQ(of(to_json(config, "float32")), config);
  }
}

TEST(LanguageModelConfigTest, CountsTheParametersThatTheModelHas) {
  for (const ModelConfig& config : testing::all_small_configs()) {
    SCOPED_TRACE(name_of(config.architecture));
    const auto model = make_model(config);
    std::set<const c10::TensorImpl*> seen;
    int64_t numel = 0;
    for (const torch::Tensor& parameter : model->parameters()) {
      if (seen.insert(parameter.unsafeGetTensorImpl()).second) numel += parameter.numel();
    }
    EXPECT_EQ(count_parameters(config), numel);
  }
}

}  // namespace
}  // namespace zeropage::config_test
