#include "tools/plan/decoder_shape.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <map>
#include <optional>
#include <stdexcept>
#include <vector>

#include <nlohmann/json.hpp>

namespace zeropage::tools {
namespace {

using Family = DecoderShape::Family;
using nlohmann::json;

[[noreturn]] void refuse(const std::string& words) {
  throw std::invalid_argument(words);
}

void check_experts(const std::string& who, const DecoderShape& shape) {
  const ExpertShape& experts = *shape.experts;
  if (experts.count < 1 || experts.active < 1 || experts.active > experts.count) {
    refuse(who + ": a token takes from 1 to all experts of a layer, got " +
           std::to_string(experts.active) + " of " + std::to_string(experts.count));
  }
  if (experts.feed_forward < 1 || experts.shared < 0 || experts.sparse_step < 1) {
    refuse(who + ": expected experts of 1 feature or more, got " +
           std::to_string(experts.feed_forward));
  }
  for (int64_t layer = 0; layer < shape.layers; ++layer) {
    if (shape.is_sparse(layer)) return;
  }
  refuse(who + ": decoder_sparse_step and mlp_only_layers leave no layer with experts");
}

// What every shape must be. who: whose shape, such as "--model gpt".
DecoderShape checked(const std::string& who, const DecoderShape& shape) {
  const auto positive = [&](const char* what, int64_t value) {
    if (value < 1) {
      refuse(who + ": expected " + what + " of 1 or more, got " + std::to_string(value));
    }
  };
  positive("a width", shape.width);
  positive("layers", shape.layers);
  positive("heads", shape.heads);
  positive("heads of keys", shape.key_heads);
  positive("a width of heads", shape.head_width);
  positive("a width of the feed-forward layer", shape.feed_forward);
  positive("a vocabulary", shape.vocabulary);
  if (shape.positions < 0) {
    refuse(who + ": expected positions of 0 or more, got " + std::to_string(shape.positions));
  }
  if (shape.heads % shape.key_heads != 0) {
    refuse(who + ": " + std::to_string(shape.heads) + " heads cannot share " +
           std::to_string(shape.key_heads) + " heads of keys equally");
  }
  if (shape.experts) check_experts(who, shape);
  return shape;
}

int64_t width_of_heads(const std::string& who, int64_t width, int64_t heads) {
  if (heads < 1 || width % heads != 0) {
    refuse(who + ": a width of " + std::to_string(width) + " cannot be cut into " +
           std::to_string(heads) + " heads; use a divisor");
  }
  return width / heads;
}

// Llama's two thirds of four widths, rounded up to 256.
int64_t gated_feed_forward(int64_t width) {
  constexpr int64_t kMultiple = 256;
  return (8 * width / 3 + kMultiple - 1) / kMultiple * kMultiple;
}

int64_t number_of(const std::string& who, const std::string& key, const std::string& text) {
  int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stopped != end) {
    refuse(who + ": expected a whole number for " + key + ", got \"" + text + "\"");
  }
  return value;
}

std::map<std::string, int64_t> read_pairs(const std::string& who, const std::string& text) {
  std::map<std::string, int64_t> pairs;
  size_t begin = 0;
  while (begin < text.size()) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string pair = text.substr(begin, end - begin);
    const size_t equals = pair.find('=');
    if (equals == std::string::npos) {
      refuse(who + ": expected KEY=NUMBER with commas between, got \"" + pair + "\"");
    }
    const std::string key = pair.substr(0, equals);
    if (!pairs.emplace(key, number_of(who, key, pair.substr(equals + 1))).second) {
      refuse(who + ": " + key + " is given twice");
    }
    begin = end + 1;
  }
  return pairs;
}

// A config's numbers, by their names.
class Config {
 public:
  Config(std::string path, json values) : path_(std::move(path)), values_(std::move(values)) {}

  int64_t number(const char* key) const {
    const auto value = optional_number(key);
    if (!value)
      refuse(path_ + ": expected \"" + key + "\", as a config.json of its model_type has");
    return *value;
  }
  int64_t number_or(const char* key, int64_t otherwise) const {
    return optional_number(key).value_or(otherwise);
  }
  bool has(const char* key) const {
    const auto at = values_.find(key);
    return at != values_.end() && !at->is_null();
  }
  std::vector<int64_t> numbers(const char* key) const {
    if (!has(key)) return {};
    const json& list = values_.at(key);
    std::vector<int64_t> numbers;
    if (!list.is_array()) refuse(path_ + ": \"" + key + "\": expected a list of whole numbers");
    for (const json& one : list) {
      if (!one.is_number_integer()) {
        refuse(path_ + ": \"" + key + "\": expected a list of whole numbers");
      }
      numbers.push_back(one.get<int64_t>());
    }
    return numbers;
  }
  bool flag_or(const char* key, bool otherwise) const {
    const auto at = values_.find(key);
    if (at == values_.end() || at->is_null()) return otherwise;
    if (!at->is_boolean()) refuse(path_ + ": \"" + key + "\": expected true or false");
    return at->get<bool>();
  }
  const std::string& path() const { return path_; }

 private:
  std::optional<int64_t> optional_number(const char* key) const {
    const auto at = values_.find(key);
    if (at == values_.end() || at->is_null()) return std::nullopt;
    if (!at->is_number_integer()) refuse(path_ + ": \"" + key + "\": expected a whole number");
    return at->get<int64_t>();
  }

  const std::string path_;
  const json values_;
};

DecoderShape gpt2_of(const Config& config) {
  const int64_t width = config.number("n_embd");
  const int64_t heads = config.number("n_head");
  return {.family = Family::kGpt,
          .width = width,
          .layers = config.number("n_layer"),
          .heads = heads,
          .key_heads = heads,
          .head_width = width_of_heads(config.path(), width, heads),
          .feed_forward = config.number_or("n_inner", 4 * width),
          .vocabulary = config.number("vocab_size"),
          .positions = config.number_or("n_positions", 0),
          .is_head_tied = config.flag_or("tie_word_embeddings", true)};
}

// name: the model_type. Qwen2 has biases of queries, keys and values, and no key that says so.
DecoderShape llama_of(const Config& config, const std::string& name) {
  const int64_t width = config.number("hidden_size");
  const int64_t heads = config.number("num_attention_heads");
  const int64_t head_width = config.number_or("head_dim", 0);
  return {.family = Family::kLlama,
          .width = width,
          .layers = config.number("num_hidden_layers"),
          .heads = heads,
          .key_heads = config.number_or("num_key_value_heads", heads),
          .head_width = head_width > 0 ? head_width : width_of_heads(config.path(), width, heads),
          .feed_forward = config.number("intermediate_size"),
          .vocabulary = config.number("vocab_size"),
          .positions = 0,
          .is_head_tied = config.flag_or("tie_word_embeddings", false),
          .has_query_bias = name == "qwen2" || config.flag_or("attention_bias", false),
          .has_output_bias = name != "qwen2" && config.flag_or("attention_bias", false),
          .has_feed_forward_bias = config.flag_or("mlp_bias", false)};
}

bool is_mixture(const std::string& name) {
  return name == "mixtral" || name == "qwen2_moe" || name == "qwen3_moe";
}

// The layers that are a mixture of experts, as transformers' classes read the same file.
DecoderShape mixture_of(const Config& config, const std::string& name) {
  DecoderShape shape = llama_of(config, name);
  const bool is_mixtral = name == "mixtral";
  ExpertShape experts{
      .count = config.number(config.has("num_local_experts") ? "num_local_experts" : "num_experts"),
      .active = config.number("num_experts_per_tok"),
      .feed_forward = is_mixtral ? shape.feed_forward : config.number("moe_intermediate_size")};
  if (!is_mixtral) {
    experts.normalises = config.flag_or("norm_topk_prob", false);
    experts.sparse_step = config.number_or("decoder_sparse_step", 1);
    experts.dense_layers = config.numbers("mlp_only_layers");
  }
  if (name == "qwen2_moe") {
    experts.shared = config.number("shared_expert_intermediate_size");
    shape.has_query_bias = config.flag_or("qkv_bias", true);
    shape.has_output_bias = false;
  }
  shape.has_head_norms = name == "qwen3_moe";
  shape.experts = experts;
  return shape;
}

// What takes experts of other kinds would be planned without them.
void refuse_experts(const Config& config) {
  for (const char* key : {"num_local_experts", "num_experts", "n_routed_experts"}) {
    if (!config.has(key)) continue;
    refuse(config.path() + ": \"" + key +
           "\": experts are known of mixtral, qwen2_moe and qwen3_moe; describe another model's by "
           "--model llama:...,experts=E,active=K,expert_ffn=WIDTH");
  }
}

}  // namespace

bool DecoderShape::is_sparse(int64_t layer) const {
  if (!experts) return false;
  const std::vector<int64_t>& dense = experts->dense_layers;
  return (layer + 1) % experts->sparse_step == 0 &&
         std::find(dense.begin(), dense.end(), layer) == dense.end();
}

DecoderShape read_shape(const std::string& text) {
  const std::string family = text.substr(0, text.find(':'));
  if (family != "gpt" && family != "llama") {
    refuse("--model " + text + ": expected gpt:... or llama:..., such as " +
           "gpt:d=4096,layers=32,heads=32; --config reads a config.json");
  }
  const std::string who = "--model " + family;
  auto pairs = read_pairs(who, text.substr(std::min(text.size(), family.size() + 1)));
  const auto take = [&](const char* key, std::optional<int64_t> otherwise = std::nullopt) {
    const auto at = pairs.find(key);
    if (at == pairs.end()) {
      if (!otherwise) refuse(who + ": expected " + key + "=NUMBER, which is missing");
      return *otherwise;
    }
    const int64_t value = at->second;
    pairs.erase(at);
    return value;
  };
  const bool is_gpt = family == "gpt";
  DecoderShape shape{.family = is_gpt ? Family::kGpt : Family::kLlama};
  shape.width = take("d");
  shape.layers = take("layers");
  shape.heads = take("heads");
  shape.key_heads = take("key_heads", shape.heads);
  shape.head_width = width_of_heads(who, shape.width, shape.heads);
  shape.feed_forward = take("ffn", is_gpt ? 4 * shape.width : gated_feed_forward(shape.width));
  shape.vocabulary = take("vocabulary", is_gpt ? 50257 : 32000);
  shape.positions = is_gpt ? take("positions", 0) : 0;
  shape.is_head_tied = take("tied", is_gpt ? 1 : 0) != 0;
  if (const int64_t count = take("experts", 0); count != 0) {
    ExpertShape experts{.count = count, .active = take("active", 2)};
    experts.feed_forward = take("expert_ffn", 0);
    if (experts.feed_forward == 0) {
      if (experts.active < 1 || shape.feed_forward % experts.active != 0) {
        refuse(who + ": " + std::to_string(experts.active) + " active experts do not divide ffn=" +
               std::to_string(shape.feed_forward) + "; say an expert's features by expert_ffn");
      }
      experts.feed_forward = shape.feed_forward / experts.active;
    }
    shape.experts = experts;
  }
  if (is_gpt && shape.key_heads != shape.heads) {
    refuse(who + ": key_heads: every head of a GPT has keys of its own; leave it out");
  }
  if (!pairs.empty()) {
    refuse(who + ": unknown key " + pairs.begin()->first +
           "; known are d, layers, heads, key_heads, ffn, vocabulary, tied, of gpt positions, and "
           "experts, with active and expert_ffn");
  }
  return checked(who, shape);
}

DecoderShape read_config(const std::string& path) {
  std::ifstream in(path);
  if (!in) refuse("--config " + path + ": cannot be read; is the file there?");
  const json values = json::parse(in, /*callback=*/nullptr, /*allow_exceptions=*/false);
  if (!values.is_object())
    refuse(path + ": expected a JSON object, as Hugging Face's config.json is");
  const auto type = values.find("model_type");
  const std::string name =
      type != values.end() && type->is_string() ? type->get<std::string>() : "";
  const Config config(path, values);
  if (is_mixture(name)) return checked(path, mixture_of(config, name));
  refuse_experts(config);
  if (name == "gpt2") return checked(path, gpt2_of(config));
  if (name == "llama" || name == "mistral" || name == "qwen2") {
    return checked(path, llama_of(config, name));
  }
  refuse(path + ": \"model_type\" is " + (name.empty() ? "missing" : "\"" + name + "\"") +
         ", but gpt2, llama, mistral, qwen2, mixtral, qwen2_moe and qwen3_moe are known; describe "
         "another one's size by --model");
}

}  // namespace zeropage::tools
