#include "language_model/model/config.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <stdexcept>
#include <utility>

#include "language_model/model/config_fields.h"

namespace language_model {
namespace {

using nlohmann::json;

constexpr std::array<std::pair<const char*, Architecture>, 7> kArchitectures = {
    {{"llama", Architecture::kLlama},
     {"mistral", Architecture::kMistral},
     {"qwen2", Architecture::kQwen2},
     {"gpt2", Architecture::kGpt2},
     {"mixtral", Architecture::kMixtral},
     {"qwen2_moe", Architecture::kQwen2Moe},
     {"qwen3_moe", Architecture::kQwen3Moe}}};

bool has_experts(Architecture architecture) {
  return architecture == Architecture::kMixtral || architecture == Architecture::kQwen2Moe ||
         architecture == Architecture::kQwen3Moe;
}

// Fields by which models of other kinds compute something else, and their values with which they do not. A config.json whose
// model_type was changed by hand has them.
void refuse_other_arithmetic(ConfigFields& fields, Architecture architecture) {
  const std::vector<std::pair<const char*, json>> neutral = {
      // Granite
      {"embedding_multiplier", 1.0},
      {"residual_multiplier", 1.0},
      {"attention_multiplier", nullptr},
      {"logits_scaling", 1.0},
      // Gemma
      {"query_pre_attn_scalar", nullptr},
      {"attn_logit_softcapping", nullptr},
      {"final_logit_softcapping", nullptr},
      {"logits_soft_cap", nullptr},
      {"rope_local_base_freq", nullptr},
      {"sliding_window_pattern", nullptr},
      // MiniCPM, Cohere, OLMo, Phi, SmolLM3
      {"scale_emb", 1.0},
      {"scale_depth", nullptr},
      {"dim_model_base", nullptr},
      {"logit_scale", 1.0},
      {"clip_qkv", nullptr},
      {"use_qk_norm", false},
      {"qk_layernorm", false},
      {"use_parallel_residual", false},
      {"rope_interleave", false},
      {"rotary_pct", 1.0},
      {"no_rope_layer_interval", nullptr},
      {"alibi", false},
      // Mixtures of experts of other kinds
      {"n_routed_experts", nullptr},
      {"num_shared_experts", nullptr},
      {"router_jitter_noise", 0.0},
      {"routed_scaling_factor", 1.0},
  };
  if (!has_experts(architecture)) {
    for (const char* key : {"num_local_experts", "num_experts"}) fields.must_be(key, nullptr);
  }
  for (const auto& [key, value] : neutral) fields.must_be(key, value);
  if (fields.has("no_rope_layers")) {
    const json& layers = fields.object()["no_rope_layers"];
    const bool has_all = layers.is_array() && std::all_of(layers.begin(), layers.end(),
                                                          [](const json& one) { return one == 1; });
    if (!has_all)
      fields.refuse("no_rope_layers: layers without rotary positions are not supported");
  }
  if (fields.has("layer_types")) {
    const json& types = fields.object()["layer_types"];
    const bool is_full =
        types.is_array() && std::all_of(types.begin(), types.end(),
                                        [](const json& one) { return one == "full_attention"; });
    if (!is_full)
      fields.refuse("layer_types: only \"full_attention\" is supported, got " + types.dump());
  }
}

void read_scaling(ConfigFields& fields, const char* key, ModelConfig& config) {
  if (!fields.has(key)) return;
  const json& scaling = fields.object()[key];
  if (!scaling.is_object()) {
    fields.refuse(std::string(key) + ": expected an object, got " + scaling.dump());
    return;
  }
  const json type = scaling.value("rope_type", scaling.value("type", json("default")));
  if (scaling.contains("rope_theta") && scaling["rope_theta"].is_number()) {
    config.rope_theta = scaling["rope_theta"];
  }
  if (type == "default") return;
  if (type != "llama3") {
    fields.refuse(std::string(key) + ": positions of type " + type.dump() +
                  " are not supported, only \"default\" and \"llama3\"");
    return;
  }
  ConfigFields inner(scaling, key);
  RopeScaling found;
  for (const char* needed :
       {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}) {
    if (!inner.has(needed)) fields.refuse(std::string(key) + ": " + needed + " is missing");
  }
  found.factor = inner.positive("factor", found.factor);
  found.low_frequency_factor = inner.positive("low_freq_factor", found.low_frequency_factor);
  found.high_frequency_factor = inner.positive("high_freq_factor", found.high_frequency_factor);
  found.original_context = inner.count("original_max_position_embeddings", found.original_context);
  try {
    inner.check();
  } catch (const std::runtime_error& error) {
    fields.refuse(error.what());
  }
  config.rope_scaling = found;
}

struct Defaults {
  int64_t vocabulary, mlp_width, key_value_heads, context;
  double norm_epsilon = 1e-6, rope_theta = 1e4;
  int64_t width = 4096, layers = 32, heads = 32;
};

Defaults defaults_of(Architecture architecture) {
  switch (architecture) {
    case Architecture::kMistral:
      return {32000, 14336, 8, 131072};
    case Architecture::kQwen2:
      return {151936, 22016, 32, 32768};
    case Architecture::kMixtral:
      return {32000, 14336, 8, 131072, 1e-5, 1e6};
    case Architecture::kQwen2Moe:
      return {151936, 5632, 16, 32768, 1e-6, 1e4, 2048, 24, 16};
    case Architecture::kQwen3Moe:
      return {151936, 6144, 4, 32768, 1e-6, 1e4, 2048, 24, 32};
    default:
      return {32000, 11008, 0, 2048};
  }
}

// Which layers have experts, and what those are.
void read_experts(ConfigFields& fields, ModelConfig& config) {
  if (!has_experts(config.architecture)) return;
  const bool is_mixtral = config.architecture == Architecture::kMixtral;
  const bool is_qwen2 = config.architecture == Architecture::kQwen2Moe;
  ExpertsConfig experts;
  const char* const count = fields.has("num_local_experts") ? "num_local_experts" : "num_experts";
  experts.count = fields.count(count, is_mixtral ? 8 : is_qwen2 ? 60 : 128);
  experts.active = fields.count("num_experts_per_tok", is_mixtral ? 2 : is_qwen2 ? 4 : 8);
  if (experts.active > experts.count) {
    fields.refuse("num_experts_per_tok " + std::to_string(experts.active) + " is more than the " +
                  std::to_string(experts.count) + " experts that a layer has (" + count + ")");
  }
  experts.balance_loss = fields.not_negative("router_aux_loss_coef", 0.001);
  experts.width = config.mlp_width;
  if (!is_mixtral) {
    experts.width = fields.count("moe_intermediate_size", is_qwen2 ? 1408 : 768);
    experts.normalise = fields.flag("norm_topk_prob", false);
    experts.sparse_step = fields.count("decoder_sparse_step", 1);
    experts.dense_layers = fields.tokens("mlp_only_layers");
  }
  if (is_qwen2) experts.shared_width = fields.count("shared_expert_intermediate_size", 5632);
  config.experts = experts;
  config.head_norms = config.architecture == Architecture::kQwen3Moe;
  if (is_qwen2) config.query_bias = fields.flag("qkv_bias", true);
  if (config.head_norms)
    config.query_bias = config.output_bias = fields.flag("attention_bias", false);
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    if (is_sparse(config, layer)) return;
  }
  fields.refuse("decoder_sparse_step and mlp_only_layers leave no layer with experts");
}

void read_llama(ConfigFields& fields, ModelConfig& config) {
  const Defaults defaults = defaults_of(config.architecture);
  config.width = fields.count("hidden_size", defaults.width);
  config.layers = fields.count("num_hidden_layers", defaults.layers);
  config.heads = fields.count("num_attention_heads", defaults.heads);
  config.vocabulary = fields.count("vocab_size", defaults.vocabulary);
  config.mlp_width = fields.count("intermediate_size", defaults.mlp_width);
  config.key_value_heads =
      fields.count("num_key_value_heads",
                   defaults.key_value_heads > 0 ? defaults.key_value_heads : config.heads);
  config.context = fields.count("max_position_embeddings", defaults.context);
  if (!fields.has("head_dim") && config.width % config.heads != 0) {
    fields.refuse("hidden_size " + std::to_string(config.width) + " is no multiple of the " +
                  std::to_string(config.heads) + " num_attention_heads, and there is no head_dim");
  }
  config.head_width = fields.count("head_dim", std::max<int64_t>(1, config.width / config.heads));
  if (config.head_width % 2 != 0) {
    fields.refuse("head_dim " + std::to_string(config.head_width) +
                  ": rotary positions need an even one");
  }
  config.norm_epsilon = fields.positive("rms_norm_eps", defaults.norm_epsilon);
  config.rope_theta = fields.positive("rope_theta", defaults.rope_theta);
  config.tied_head = fields.flag("tie_word_embeddings", false);
  const bool is_qwen2 = config.architecture == Architecture::kQwen2;
  const bool is_llama = config.architecture == Architecture::kLlama;
  config.query_bias = is_qwen2 || (is_llama && fields.flag("attention_bias", false));
  config.output_bias = is_llama && fields.flag("attention_bias", false);
  config.mlp_bias = is_llama && fields.flag("mlp_bias", false);
  if (config.architecture == Architecture::kMistral) {
    // Null is a mistral without a window, and a missing field has the class's 4096.
    const bool is_null =
        fields.object().contains("sliding_window") && fields.object()["sliding_window"].is_null();
    if (!is_null) config.window = fields.count("sliding_window", 4096);
  }
  if (is_llama || config.architecture == Architecture::kMixtral)
    fields.must_be("sliding_window", nullptr);
  read_experts(fields, config);
  fields.must_be("use_sliding_window", false);
  fields.must_be("partial_rotary_factor", 1.0);
  fields.must_be("attention_dropout", 0.0);
  fields.word("hidden_act", {"silu", "swish"});
  read_scaling(fields, "rope_scaling", config);
  read_scaling(fields, "rope_parameters", config);
}

void read_gpt2(ConfigFields& fields, ModelConfig& config) {
  config.width = fields.count("n_embd", 768);
  config.layers = fields.count("n_layer", 12);
  config.heads = fields.count("n_head", 12);
  config.key_value_heads = config.heads;
  if (config.width % config.heads != 0) {
    fields.refuse("n_embd " + std::to_string(config.width) + " is no multiple of the " +
                  std::to_string(config.heads) + " n_head");
  }
  config.head_width = std::max<int64_t>(1, config.width / config.heads);
  config.vocabulary = fields.count("vocab_size", 50257);
  config.mlp_width = fields.count("n_inner", 4 * config.width);
  config.context = fields.count("n_positions", 1024);
  config.norm_epsilon = fields.positive("layer_norm_epsilon", 1e-5);
  config.tied_head = fields.flag("tie_word_embeddings", true);
  config.query_bias = config.output_bias = config.mlp_bias = true;
  config.embedding_dropout = fields.probability("embd_pdrop", 0.1);
  config.attention_dropout = fields.probability("attn_pdrop", 0.1);
  config.residual_dropout = fields.probability("resid_pdrop", 0.1);
  fields.word("activation_function", {"gelu_new", "gelu_pytorch_tanh"});
  fields.must_be("scale_attn_weights", true);
  fields.must_be("scale_attn_by_inverse_layer_idx", false);
  fields.must_be("add_cross_attention", false);
}

}  // namespace

const char* name_of(Architecture architecture) {
  return kArchitectures.at(static_cast<size_t>(architecture)).first;
}

int64_t longest_sequence(const ModelConfig& config) {
  return std::min(config.context, config.window.value_or(config.context));
}

bool is_sparse(const ModelConfig& config, int64_t layer) {
  if (!config.experts) return false;
  const auto& dense = config.experts->dense_layers;
  return (layer + 1) % config.experts->sparse_step == 0 &&
         std::find(dense.begin(), dense.end(), layer) == dense.end();
}

int64_t count_parameters(const ModelConfig& config) {
  const int64_t d = config.width, queries = config.heads * config.head_width;
  const int64_t keys = 2 * config.key_value_heads * config.head_width;
  const bool is_gpt2 = config.architecture == Architecture::kGpt2;
  const int64_t projections = is_gpt2 ? 2 : 3;
  int64_t layer = d * (queries + keys) + queries * d + (is_gpt2 ? 4 * d : 2 * d);
  if (config.query_bias) layer += queries + keys;
  if (config.output_bias) layer += d;
  if (config.head_norms) layer += 2 * config.head_width;
  int64_t dense = projections * d * config.mlp_width;
  if (config.mlp_bias) dense += (projections - 1) * config.mlp_width + d;
  const ExpertsConfig experts = config.experts.value_or(ExpertsConfig{});
  int64_t sparse = experts.count * (d + 3 * d * experts.width);
  if (experts.shared_width > 0) sparse += d + 3 * d * experts.shared_width;
  int64_t layers = 0;
  for (int64_t i = 0; i < config.layers; ++i)
    layers += layer + (is_sparse(config, i) ? sparse : dense);
  const int64_t embeddings = (config.vocabulary + (is_gpt2 ? config.context : 0)) * d;
  const int64_t head = config.tied_head ? 0 : config.vocabulary * d;
  return embeddings + layers + (is_gpt2 ? 2 * d : d) + head;
}

ModelConfig config_from_json(const json& object, const std::string& name) {
  if (!object.is_object()) {
    throw std::runtime_error(name + ": expected a JSON object, as Hugging Face's config.json is");
  }
  const json type = object.value("model_type", json());
  ModelConfig config;
  bool is_known = false;
  std::string known;
  for (const auto& [word, architecture] : kArchitectures) {
    known += (known.empty() ? "" : ", ") + std::string(word);
    if (type != word) continue;
    config.architecture = architecture;
    is_known = true;
  }
  if (!is_known) {
    throw std::runtime_error(name + ": model_type " +
                             (type.is_null() ? "is missing" : type.dump() + " is not known") +
                             "; known are " + known);
  }
  ConfigFields fields(object, name);
  fields.must_be("quantization_config", nullptr);
  refuse_other_arithmetic(fields, config.architecture);
  if (config.architecture == Architecture::kGpt2) {
    read_gpt2(fields, config);
  } else {
    read_llama(fields, config);
  }
  if (config.heads % config.key_value_heads != 0) {
    fields.refuse("num_attention_heads " + std::to_string(config.heads) +
                  " is no multiple of num_key_value_heads " +
                  std::to_string(config.key_value_heads));
  }
  constexpr int64_t kMostLayers = 10'000;
  if (config.layers > kMostLayers) {
    fields.refuse("expected at most " + std::to_string(kMostLayers) + " layers, got " +
                  std::to_string(config.layers));
  }
  config.initial_deviation = fields.positive("initializer_range", 0.02);
  const std::vector<int64_t> begin = fields.tokens("bos_token_id");
  if (!begin.empty()) config.begin_token = begin.front();
  config.end_tokens = fields.tokens("eos_token_id");
  fields.check();
  return config;
}

ModelConfig read_config(const std::filesystem::path& file) {
  std::ifstream stream(file);
  if (!stream) throw std::runtime_error(file.string() + ": cannot be read");
  const json object = json::parse(stream, nullptr, /*allow_exceptions=*/false);
  if (object.is_discarded()) throw std::runtime_error(file.string() + ": is no JSON");
  return config_from_json(object, file.string());
}

json to_json(const ModelConfig& config, const std::string& dtype) {
  json object = {{"model_type", name_of(config.architecture)},
                 {"torch_dtype", dtype},
                 {"vocab_size", config.vocabulary},
                 {"tie_word_embeddings", config.tied_head},
                 {"initializer_range", config.initial_deviation}};
  if (config.begin_token) object["bos_token_id"] = *config.begin_token;
  if (config.end_tokens.size() == 1) object["eos_token_id"] = config.end_tokens.front();
  if (config.end_tokens.size() > 1) object["eos_token_id"] = config.end_tokens;
  if (config.architecture == Architecture::kGpt2) {
    object.update({{"architectures", {"GPT2LMHeadModel"}},
                   {"n_embd", config.width},
                   {"n_layer", config.layers},
                   {"n_head", config.heads},
                   {"n_inner", config.mlp_width},
                   {"n_positions", config.context},
                   {"n_ctx", config.context},
                   {"layer_norm_epsilon", config.norm_epsilon},
                   {"embd_pdrop", config.embedding_dropout},
                   {"attn_pdrop", config.attention_dropout},
                   {"resid_pdrop", config.residual_dropout},
                   {"activation_function", "gelu_new"}});
    return object;
  }
  object.update({{"hidden_size", config.width},
                 {"intermediate_size", config.mlp_width},
                 {"num_hidden_layers", config.layers},
                 {"num_attention_heads", config.heads},
                 {"num_key_value_heads", config.key_value_heads},
                 {"head_dim", config.head_width},
                 {"max_position_embeddings", config.context},
                 {"rms_norm_eps", config.norm_epsilon},
                 {"rope_theta", config.rope_theta},
                 {"hidden_act", "silu"}});
  if (config.rope_scaling) {
    object["rope_scaling"] = {
        {"rope_type", "llama3"},
        {"factor", config.rope_scaling->factor},
        {"low_freq_factor", config.rope_scaling->low_frequency_factor},
        {"high_freq_factor", config.rope_scaling->high_frequency_factor},
        {"original_max_position_embeddings", config.rope_scaling->original_context}};
  }
  if (config.experts) {
    object.update({{"num_experts_per_tok", config.experts->active},
                   {"router_aux_loss_coef", config.experts->balance_loss}});
    if (config.architecture != Architecture::kMixtral) {
      object.update({{"num_experts", config.experts->count},
                     {"moe_intermediate_size", config.experts->width},
                     {"norm_topk_prob", config.experts->normalise},
                     {"decoder_sparse_step", config.experts->sparse_step},
                     {"mlp_only_layers", config.experts->dense_layers},
                     {"use_sliding_window", false}});
    }
  }
  switch (config.architecture) {
    case Architecture::kMistral:
      object["architectures"] = {"MistralForCausalLM"};
      object["sliding_window"] = config.window ? json(*config.window) : json();
      break;
    case Architecture::kQwen2:
      object["architectures"] = {"Qwen2ForCausalLM"};
      object["use_sliding_window"] = false;
      break;
    case Architecture::kMixtral:
      object.update({{"architectures", {"MixtralForCausalLM"}},
                     {"sliding_window", nullptr},
                     {"num_local_experts", config.experts->count}});
      break;
    case Architecture::kQwen2Moe:
      object.update({{"architectures", {"Qwen2MoeForCausalLM"}},
                     {"qkv_bias", config.query_bias},
                     {"shared_expert_intermediate_size", config.experts->shared_width}});
      break;
    case Architecture::kQwen3Moe:
      object.update(
          {{"architectures", {"Qwen3MoeForCausalLM"}}, {"attention_bias", config.query_bias}});
      break;
    default:
      object["architectures"] = {"LlamaForCausalLM"};
      object["attention_bias"] = config.query_bias;
      object["mlp_bias"] = config.mlp_bias;
  }
  return object;
}

}  // namespace language_model
