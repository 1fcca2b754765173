// Texts that go on, token by token, with a cache of keys and values.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "language_model/generate/sampler.h"
#include "language_model/model/wrapped_model.h"

namespace language_model {

struct Prompt {
  std::vector<int32_t> tokens;
  uint64_t seed = 0;  // of what is drawn for its answer
};

struct GenerationOptions {
  SamplingOptions sampling;
  int64_t most_tokens = 128;  // of an answer
  // Tokens that end an answer, and belong to it.
  std::vector<int64_t> end_tokens;
};

// Throws for a prompt without a token, one of another vocabulary, and one that leaves no room for a token.
void check_prompt(const ModelConfig& config, const std::vector<int32_t>& prompt);

// Answers this rank's prompts, one after the other. Ranks may have different numbers of prompts, or none, and answers of different
// lengths: a rank that has ended takes part in what is collective until all have.
// on_token: is called for each new token, with the prompt's index. An answer ends with an end token, after most_tokens, or
// with the model's longest sequence.
// Returns the answers. Throws as check_prompt(), on all ranks alike. Collective. Threads: the training thread.
std::vector<std::vector<int32_t>> generate(
    WrappedModel& model, const std::vector<Prompt>& prompts, const GenerationOptions& options,
    const std::function<void(size_t prompt, int32_t token)>& on_token = nullptr);

}  // namespace language_model
