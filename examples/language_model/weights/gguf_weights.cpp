#include "language_model/weights/gguf_weights.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <stdexcept>
#include <utility>

namespace language_model {
namespace {

using zeropage::text::GgufFile;
using zeropage::text::GgufTensor;

constexpr std::array<std::pair<const char*, const char*>, 3> kOutside = {
    {{"token_embd", "model.embed_tokens"}, {"output_norm", "model.norm"}, {"output", "lm_head"}}};
constexpr std::array<std::pair<const char*, const char*>, 9> kInLayer = {
    {{"attn_norm", "input_layernorm"},
     {"attn_q", "self_attn.q_proj"},
     {"attn_k", "self_attn.k_proj"},
     {"attn_v", "self_attn.v_proj"},
     {"attn_output", "self_attn.o_proj"},
     {"ffn_norm", "post_attention_layernorm"},
     {"ffn_gate", "mlp.gate_proj"},
     {"ffn_up", "mlp.up_proj"},
     {"ffn_down", "mlp.down_proj"}}};

template <typename Names>
std::string translated(const Names& names, const std::string& name) {
  const size_t dot = name.rfind('.');
  for (const auto& [theirs, ours] : names) {
    if (name.substr(0, dot) == theirs) return ours + name.substr(dot);
  }
  return "";
}

// "" for a tensor that models here do not have.
std::string hugging_face_name(const std::string& name) {
  if (name.find('.') == std::string::npos) return "";
  constexpr std::string_view kBlock = "blk.";
  if (!name.starts_with(kBlock)) return translated(kOutside, name);
  const size_t end = name.find('.', kBlock.size());
  if (end == std::string::npos || name.find('.', end + 1) == std::string::npos) return "";
  const std::string inner = translated(kInLayer, name.substr(end + 1));
  if (inner.empty()) return "";
  return "model.layers." + name.substr(kBlock.size(), end - kBlock.size()) + "." + inner;
}

// The shortest decimal number that the file's fp32 stands for: 1e-05, and not 9.999999747378752e-06.
double as_written(double number) {
  char text[32];
  const auto written = std::to_chars(text, text + sizeof text, static_cast<float>(number));
  double decimal = number;
  std::from_chars(text, written.ptr, decimal);
  return decimal;
}

// llama.cpp interleaves the two halves of each head's rows, so that rotary pairs lie side by side.
bool is_interleaved(const ModelConfig& config, const std::string& hugging_face) {
  if (config.architecture == Architecture::kQwen2) return false;
  return hugging_face.find("self_attn.q_proj.") != std::string::npos ||
         hugging_face.find("self_attn.k_proj.") != std::string::npos;
}

}  // namespace

ModelConfig config_of(const GgufFile& file) {
  const std::string architecture(file.string("general.architecture"));
  if (architecture != "llama" && architecture != "qwen2") {
    throw std::runtime_error(file.name() + ": architecture \"" + architecture +
                             "\" is not known in GGUF; known are llama and qwen2. Take the "
                             "model's safetensors");
  }
  const auto key = [&](const char* end) { return architecture + "." + end; };
  const auto optional = [&](const char* end, int64_t otherwise) {
    return file.has(key(end)) ? file.integer(key(end)) : otherwise;
  };
  const bool is_scaled =
      file.has(key("rope.scaling.type")) && file.string(key("rope.scaling.type")) != "none";
  if (is_scaled || file.has_tensor("rope_freqs.weight")) {
    throw std::runtime_error(file.name() +
                             ": scaled rotary positions are not read from GGUF; take the model's "
                             "safetensors and config.json");
  }
  if (optional("expert_count", 0) > 0) {
    throw std::runtime_error(file.name() + ": models of experts are not known");
  }
  ModelConfig config;
  config.architecture = architecture == "qwen2" ? Architecture::kQwen2 : Architecture::kLlama;
  config.vocabulary = file.tensor("token_embd.weight").shape.front();
  config.width = file.integer(key("embedding_length"));
  config.mlp_width = file.integer(key("feed_forward_length"));
  config.layers = file.integer(key("block_count"));
  config.heads = file.integer(key("attention.head_count"));
  config.key_value_heads = optional("attention.head_count_kv", config.heads);
  const bool has_sizes = config.heads > 0 && config.key_value_heads > 0 &&
                         config.heads % config.key_value_heads == 0 && config.layers > 0;
  if (!has_sizes) {
    throw std::runtime_error(file.name() + ": " + std::to_string(config.heads) + " heads, " +
                             std::to_string(config.key_value_heads) + " of keys and " +
                             std::to_string(config.layers) + " layers make no model");
  }
  config.head_width = optional("attention.key_length", config.width / config.heads);
  if (optional("rope.dimension_count", config.head_width) != config.head_width) {
    throw std::runtime_error(file.name() + ": " + key("rope.dimension_count") +
                             " is not the heads' width; models that rotate a part of a head are "
                             "not known");
  }
  config.context = file.integer(key("context_length"));
  config.norm_epsilon = as_written(file.number(key("attention.layer_norm_rms_epsilon")));
  if (file.has(key("rope.freq_base"))) {
    config.rope_theta = as_written(file.number(key("rope.freq_base")));
  }
  config.tied_head = !file.has_tensor("output.weight");
  config.query_bias = file.has_tensor("blk.0.attn_q.bias");
  config.output_bias = file.has_tensor("blk.0.attn_output.bias");
  config.mlp_bias = file.has_tensor("blk.0.ffn_up.bias");
  const auto token = [&](const char* name) -> std::optional<int64_t> {
    const std::string of = std::string("tokenizer.ggml.") + name;
    return file.has(of) ? std::optional(file.integer(of)) : std::nullopt;
  };
  config.begin_token = token("bos_token_id");
  if (const auto end = token("eos_token_id")) config.end_tokens = {*end};
  return config;
}

GgufWeights::GgufWeights(std::shared_ptr<const GgufFile> file, const ModelConfig& config)
    : file_(std::move(file)) {
  std::string unreadable;
  for (size_t i = 0; i < file_->tensors().size(); ++i) {
    const GgufTensor& tensor = file_->tensors()[i];
    std::string name = hugging_face_name(tensor.name);
    if (name.empty()) name = tensor.name;  // an unexpected one, for whoever loads
    if (!can_read(tensor.type)) {
      unreadable += "\n  " + tensor.name + ": " + zeropage::text::name_of(tensor.type);
    }
    places_[name] = {i, is_interleaved(config, name) ? config.head_width : 0};
    tensors_.push_back({.name = name, .sizes = tensor.shape, .dtype = torch::kFloat32});
  }
  if (unreadable.empty()) return;
  throw std::runtime_error(file_->name() +
                           ": these tensors are quantised as is not read here:" + unreadable);
}

void GgufWeights::read(const Entry& entry, int64_t first, const at::Tensor& to) {
  const Place& place = places_.at(entry.name);
  const GgufTensor& tensor = file_->tensors()[place.tensor];
  float* out = to.mutable_data_ptr<float>();
  if (place.head_width == 0) {
    file_->read(tensor, first, to.numel(), out);
    return;
  }
  const int64_t row_numel = tensor.numel / tensor.shape.front(), half = place.head_width / 2;
  for (int64_t at = first, end = first + to.numel(); at < end;) {
    const int64_t row = at / row_numel, column = at % row_numel;
    const int64_t in_head = row % place.head_width;
    const int64_t stored = row - in_head + 2 * (in_head % half) + in_head / half;
    const int64_t count = std::min(row_numel - column, end - at);
    file_->read(tensor, stored * row_numel + column, count, out);
    out += count;
    at += count;
  }
}

}  // namespace language_model
