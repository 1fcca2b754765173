#include "language_model/model/config.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <stdexcept>
#include <utility>

namespace language_model {
namespace {

using nlohmann::json;

constexpr std::array<std::pair<const char*, Architecture>, 4> kArchitectures = {
    {{"llama", Architecture::kLlama},
     {"mistral", Architecture::kMistral},
     {"qwen2", Architecture::kQwen2},
     {"gpt2", Architecture::kGpt2}}};

// Takes fields out of a JSON object and collects what is wrong with them.
class Fields {
 public:
  Fields(const json& object, std::string name) : object_(object), name_(std::move(name)) {}

  bool has(const char* key) const { return object_.contains(key) && !object_[key].is_null(); }
  void refuse(const std::string& what) { problems_.push_back(what); }

  // 1 or more.
  int64_t count(const char* key, int64_t otherwise) {
    if (!has(key)) return otherwise;
    const json& value = object_[key];
    if (value.is_number_integer() && value > 0 && value < (int64_t{1} << 40)) return value;
    refuse(std::string(key) + ": expected a whole number above 0, got " + value.dump());
    return otherwise;
  }
  double positive(const char* key, double otherwise) {
    if (!has(key)) return otherwise;
    const json& value = object_[key];
    if (value.is_number() && value > 0) return value;
    refuse(std::string(key) + ": expected a number above 0, got " + value.dump());
    return otherwise;
  }
  double probability(const char* key, double otherwise) {
    if (!has(key)) return otherwise;
    const json& value = object_[key];
    if (value.is_number() && value >= 0 && value < 1) return value;
    refuse(std::string(key) + ": expected a probability below 1, got " + value.dump());
    return otherwise;
  }
  bool flag(const char* key, bool otherwise) {
    if (!has(key)) return otherwise;
    if (object_[key].is_boolean()) return object_[key];
    refuse(std::string(key) + ": expected true or false, got " + object_[key].dump());
    return otherwise;
  }
  // Refuses other words than these.
  void word(const char* key, const std::vector<std::string>& known) {
    if (!has(key)) return;
    for (const std::string& word : known) {
      if (object_[key] == word) return;
    }
    refuse(std::string(key) + ": expected \"" + known.front() + "\", got " + object_[key].dump());
  }
  // Refuses a part of a model that is not built here.
  void must_be(const char* key, const json& expected) {
    if (!has(key) || object_[key] == expected) return;
    refuse(std::string(key) + ": " + object_[key].dump() + " is not supported, only " +
           expected.dump());
  }
  // A token, or a list of some.
  std::vector<int64_t> tokens(const char* key) {
    if (!has(key)) return {};
    const json& value = object_[key];
    std::vector<int64_t> found;
    for (const json& token : value.is_array() ? value : json::array({value})) {
      if (!token.is_number_integer() || token < 0) {
        refuse(std::string(key) + ": expected a token's number, got " + token.dump());
        return {};
      }
      found.push_back(token);
    }
    return found;
  }
  const json& object() const { return object_; }

  void check() const {
    if (problems_.empty()) return;
    std::string message = name_ + ": this model cannot be built:";
    for (const std::string& problem : problems_) message += "\n  " + problem;
    throw std::runtime_error(message);
  }

 private:
  const json& object_;
  const std::string name_;
  std::vector<std::string> problems_;
};

// Fields by which models of other kinds compute something else, and their values with which they do not. A config.json whose
// model_type was changed by hand has them.
void refuse_other_arithmetic(Fields& fields) {
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
      // Mixtures of experts
      {"num_local_experts", nullptr},
      {"num_experts", nullptr},
      {"n_routed_experts", nullptr},
  };
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

void read_scaling(Fields& fields, const char* key, ModelConfig& config) {
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
  Fields inner(scaling, key);
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
};

Defaults defaults_of(Architecture architecture, int64_t heads) {
  switch (architecture) {
    case Architecture::kMistral:
      return {32000, 14336, 8, 131072};
    case Architecture::kQwen2:
      return {151936, 22016, 32, 32768};
    default:
      return {32000, 11008, heads, 2048};
  }
}

void read_llama(Fields& fields, ModelConfig& config) {
  config.width = fields.count("hidden_size", 4096);
  config.layers = fields.count("num_hidden_layers", 32);
  config.heads = fields.count("num_attention_heads", 32);
  const Defaults defaults = defaults_of(config.architecture, config.heads);
  config.vocabulary = fields.count("vocab_size", defaults.vocabulary);
  config.mlp_width = fields.count("intermediate_size", defaults.mlp_width);
  config.key_value_heads = fields.count("num_key_value_heads", defaults.key_value_heads);
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
  config.norm_epsilon = fields.positive("rms_norm_eps", 1e-6);
  config.rope_theta = fields.positive("rope_theta", 10000);
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
  if (is_llama) fields.must_be("sliding_window", nullptr);
  fields.must_be("use_sliding_window", false);
  fields.must_be("partial_rotary_factor", 1.0);
  fields.must_be("attention_dropout", 0.0);
  fields.word("hidden_act", {"silu", "swish"});
  read_scaling(fields, "rope_scaling", config);
  read_scaling(fields, "rope_parameters", config);
}

void read_gpt2(Fields& fields, ModelConfig& config) {
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

int64_t count_parameters(const ModelConfig& config) {
  const int64_t d = config.width, queries = config.heads * config.head_width;
  const int64_t keys = 2 * config.key_value_heads * config.head_width;
  const bool is_gpt2 = config.architecture == Architecture::kGpt2;
  const int64_t projections = is_gpt2 ? 2 : 3;
  int64_t layer = d * (queries + keys) + queries * d + projections * d * config.mlp_width;
  layer += is_gpt2 ? 4 * d : 2 * d;
  if (config.query_bias) layer += queries + keys;
  if (config.output_bias) layer += d;
  if (config.mlp_bias) layer += (projections - 1) * config.mlp_width + d;
  const int64_t embeddings = (config.vocabulary + (is_gpt2 ? config.context : 0)) * d;
  const int64_t head = config.tied_head ? 0 : config.vocabulary * d;
  return embeddings + config.layers * layer + (is_gpt2 ? 2 * d : d) + head;
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
  Fields fields(object, name);
  fields.must_be("quantization_config", nullptr);
  refuse_other_arithmetic(fields);
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
  switch (config.architecture) {
    case Architecture::kMistral:
      object["architectures"] = {"MistralForCausalLM"};
      object["sliding_window"] = config.window ? json(*config.window) : json();
      break;
    case Architecture::kQwen2:
      object["architectures"] = {"Qwen2ForCausalLM"};
      object["use_sliding_window"] = false;
      break;
    default:
      object["architectures"] = {"LlamaForCausalLM"};
      object["attention_bias"] = config.query_bias;
      object["mlp_bias"] = config.mlp_bias;
  }
  return object;
}

}  // namespace language_model
