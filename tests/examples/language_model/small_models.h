// Language models of some thousand parameters, one of each kind, for tests.
#pragma once

#include <memory>
#include <vector>

#include "examples/language_model/model/language_model.h"

namespace zeropage::testing {

inline language_model::ModelConfig small_llama() {
  return {.architecture = language_model::Architecture::kLlama,
          .vocabulary = 40,
          .width = 24,
          .mlp_width = 32,
          .layers = 3,
          .heads = 6,
          .key_value_heads = 2,
          .head_width = 8,  // so that heads are together wider than the model
          .context = 32,
          .norm_epsilon = 1e-5,
          .tied_head = true};
}

inline language_model::ModelConfig small_gpt2() {
  return {.architecture = language_model::Architecture::kGpt2,
          .vocabulary = 40,
          .width = 24,
          .mlp_width = 96,
          .layers = 2,
          .heads = 3,
          .key_value_heads = 3,
          .head_width = 8,
          .context = 32,
          .norm_epsilon = 1e-5,
          .tied_head = true,
          .query_bias = true,
          .output_bias = true,
          .mlp_bias = true};
}

inline std::vector<language_model::ModelConfig> small_configs() {
  using language_model::Architecture;
  language_model::ModelConfig llama = small_llama(), mistral = small_llama(), qwen2 = small_llama();
  llama.tied_head = false;
  llama.query_bias = llama.output_bias = llama.mlp_bias = true;
  llama.rope_scaling = language_model::RopeScaling{
      .factor = 4, .low_frequency_factor = 1, .high_frequency_factor = 4, .original_context = 16};
  llama.begin_token = 1;
  llama.end_tokens = {2, 3};
  mistral.architecture = Architecture::kMistral;
  mistral.window = 24;
  qwen2.architecture = Architecture::kQwen2;
  qwen2.query_bias = true;
  return {small_llama(), llama, mistral, qwen2, small_gpt2()};
}

// Mixtral, Qwen2-MoE with a dense layer, and Qwen3-MoE, of four experts each.
inline std::vector<language_model::ModelConfig> small_mixtures() {
  using language_model::Architecture;
  using language_model::ExpertsConfig;
  language_model::ModelConfig mixtral = small_llama(), qwen2 = small_llama(), qwen3 = small_llama();
  mixtral.tied_head = false;
  mixtral.architecture = Architecture::kMixtral;
  mixtral.experts =
      ExpertsConfig{.count = 4, .active = 2, .width = mixtral.mlp_width, .balance_loss = 0.1};
  qwen2.architecture = Architecture::kQwen2Moe;
  qwen2.query_bias = true;
  qwen2.experts = ExpertsConfig{.count = 4,
                                .active = 2,
                                .width = 12,
                                .normalise = false,
                                .shared_width = 20,
                                .dense_layers = {1},
                                .balance_loss = 0.1};
  qwen3.architecture = Architecture::kQwen3Moe;
  qwen3.head_norms = true;
  qwen3.experts =
      ExpertsConfig{.count = 4, .active = 3, .width = 12, .sparse_step = 2, .balance_loss = 0};
  return {mixtral, qwen2, qwen3};
}

inline std::vector<language_model::ModelConfig> all_small_configs() {
  std::vector<language_model::ModelConfig> all = small_configs();
  for (auto& config : small_mixtures()) all.push_back(std::move(config));
  return all;
}

// With weights that are large enough for losses to tell models apart.
inline std::shared_ptr<language_model::LanguageModel> drawn(const language_model::ModelConfig& of,
                                                            uint64_t seed = 1) {
  language_model::ModelConfig config = of;
  config.initial_deviation = 0.2;
  return language_model::make_model(config, {.seed = seed});
}

inline torch::Tensor random_tokens(const language_model::ModelConfig& config, int64_t batch,
                                   int64_t length, uint64_t seed = 7) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return torch::randint(config.vocabulary, {batch, length}, generator);
}

}  // namespace zeropage::testing
