// The shape of a decoder (GPT-2's or Llama's), from a command line or a Hugging Face config.json.
//
// Throws std::invalid_argument for text that is neither.
#pragma once

#include <cstdint>
#include <string>

namespace zeropage::tools {

struct DecoderShape {
  enum class Family : uint8_t {
    kGpt,    // learned positions, layer norms, biases, GELU (Radford et al. 2019)
    kLlama,  // rotated positions, RMS norms, gated SiLU, shared keys (Touvron et al. 2023); Mistral and Qwen2 too
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
};

// "gpt:d=4096,layers=32,heads=32" and "llama:...": besides key_heads, ffn, vocabulary, positions, tied.
DecoderShape read_shape(const std::string& text);
// The file's path. model_type: gpt2, llama, mistral or qwen2.
DecoderShape read_config(const std::string& path);

}  // namespace zeropage::tools
