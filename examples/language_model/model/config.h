// The shape of a language model: what Hugging Face's config.json says of it.
//
//   const ModelConfig config = read_config("SmolLM2-135M/config.json");
//
// Fields that a config.json leaves out have Hugging Face's defaults for their model_type.
// Throws std::runtime_error with all that is wrong in one message.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace language_model {

enum class Architecture : uint8_t {
  kLlama,
  kMistral,
  kQwen2,
  kGpt2,
  kMixtral,
  kQwen2Moe,
  kQwen3Moe
};
// The word of model_type: "llama".
const char* name_of(Architecture architecture);

// Llama 3's change of the rotary frequencies for texts that are longer than those it was first trained on.
struct RopeScaling {
  double factor = 8;
  double low_frequency_factor = 1;
  double high_frequency_factor = 4;
  int64_t original_context = 8192;  // tokens

  bool operator==(const RopeScaling&) const = default;
};

// Layers whose MLP is a mixture of experts.
struct ExpertsConfig {
  int64_t count = 0;         // experts of a layer
  int64_t active = 0;        // of a token
  int64_t width = 0;         // between the projections of an expert
  bool normalise = true;     // a token's weights are divided by their sum
  int64_t shared_width = 0;  // of the expert that all tokens take beside theirs; 0: there is none
  // Layer i, from 0 on, has experts where i + 1 is a multiple of sparse_step, and i is none of dense_layers.
  int64_t sparse_step = 1;
  std::vector<int64_t> dense_layers = {};
  // Factor of the loss that evens out how often experts are chosen, in training.
  double balance_loss = 0.001;

  bool operator==(const ExpertsConfig&) const = default;
};

struct ModelConfig {
  Architecture architecture = Architecture::kLlama;
  int64_t vocabulary = 0;
  int64_t width = 0;      // of a token between layers
  int64_t mlp_width = 0;  // between the two, or three, projections of a layer's MLP
  int64_t layers = 0;
  int64_t heads = 0;
  int64_t key_value_heads = 0;  // heads of keys and values, each shared by as many heads of queries
  int64_t head_width = 0;
  int64_t context = 0;  // the most tokens of a sequence
  // Mistral's: a token sees as many tokens before it, itself included. None: all.
  std::optional<int64_t> window = {};
  double norm_epsilon = 1e-6;
  double rope_theta = 10000;
  std::optional<RopeScaling> rope_scaling = {};
  bool tied_head = false;    // the head's weight is the embedding's
  bool query_bias = false;   // queries', keys' and values' projections have a bias
  bool output_bias = false;  // attention's output projection has one
  bool mlp_bias = false;     // the MLP's projections have one
  bool head_norms = false;   // queries and keys are normalised, each head by itself
  std::optional<ExpertsConfig> experts = {};
  double initial_deviation = 0.02;
  // GPT-2's alone, in training: of the embeddings' sum, of attention's probabilities, and of what a layer adds.
  double embedding_dropout = 0;
  double attention_dropout = 0;
  double residual_dropout = 0;
  // The token that begins a text, where the model wants one, and those that end an answer.
  std::optional<int64_t> begin_token = {};
  std::vector<int64_t> end_tokens = {};

  bool operator==(const ModelConfig&) const = default;
};

// The longest sequence that the model computes rightly here. A window is not cut into the mask, so sequences end with it.
int64_t longest_sequence(const ModelConfig& config);
// Whether that layer, from 0 on, has experts.
bool is_sparse(const ModelConfig& config, int64_t layer);
// Parameters, a tied head once.
int64_t count_parameters(const ModelConfig& config);

// name: of the file, for errors.
ModelConfig config_from_json(const nlohmann::json& json, const std::string& name);
ModelConfig read_config(const std::filesystem::path& file);
// What config_from_json() reads, with the class's name in "architectures". dtype: of the weights, "float32".
nlohmann::json to_json(const ModelConfig& config, const std::string& dtype);

}  // namespace language_model
