// The shape of a decoder (GPT-2's or Llama's), from a command line or a Hugging Face config.json.
//
// Throws std::invalid_argument for text that is neither.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace zeropage::tools {

// Layers whose feed-forward layer is a mixture of experts (zeropage/experts.h).
struct ExpertShape {
  int64_t count = 0;         // experts of a layer
  int64_t active = 0;        // of a token
  int64_t feed_forward = 0;  // features between an expert's matrices
  bool normalises = true;    // a token's weights are divided by their sum
  int64_t shared =
      0;  // features of the expert that all tokens take beside theirs; 0: there is none
  // Layer i, from 0 on, has experts where i + 1 is a multiple of it, and i is none of dense_layers.
  int64_t sparse_step = 1;
  std::vector<int64_t> dense_layers = {};
};

struct DecoderShape {
  enum class Family : uint8_t {
    kGpt,    // learned positions, layer norms, biases, GELU (Radford et al. 2019)
    kLlama,  // rotated positions, RMS norms, gated SiLU, shared keys (Touvron et al. 2023); Mistral, Qwen2 and their mixtures too
  };

  Family family = Family::kGpt;
  int64_t width = 0;
  int64_t layers = 0;
  int64_t heads = 0;
  int64_t key_heads = 0;  // of keys and values
  int64_t head_width = 0;
  int64_t feed_forward = 0;
  int64_t vocabulary = 0;
  int64_t positions = 0;  // of a table of them; 0: as many as a sample has tokens
  bool is_head_tied = true;
  // Llama's families alone: biases of queries, keys and values, of attention's output, and of the feed-forward layer.
  bool has_query_bias = false;
  bool has_output_bias = false;
  bool has_feed_forward_bias = false;
  bool has_head_norms = false;  // of queries and keys
  std::optional<ExpertShape> experts = {};

  // Whether that layer, from 0 on, has experts.
  bool is_sparse(int64_t layer) const;
};

// "gpt:d=4096,layers=32,heads=32" and "llama:...": besides key_heads, ffn, vocabulary, positions, tied; experts, active, expert_ffn.
DecoderShape read_shape(const std::string& text);
// The file's path. model_type: gpt2, llama, mistral, qwen2, mixtral, qwen2_moe or qwen3_moe.
DecoderShape read_config(const std::string& path);

}  // namespace zeropage::tools
