#include "language_model/generate/generation.h"

#include <algorithm>
#include <optional>
#include <stdexcept>

#include <zeropage/check.h>

namespace language_model {
namespace {

// One answer as far as it has come.
class Answer {
 public:
  Answer(LanguageModel& model, const Prompt& prompt, const GenerationOptions& options,
         const torch::Device& device)
      : model_(model),
        options_(options),
        device_(device),
        sampler_(options.sampling, prompt.seed),
        most_(std::min(options.most_tokens, longest_sequence(model.config()) -
                                                static_cast<int64_t>(prompt.tokens.size()))),
        // The last token of an answer is not put in.
        cache_(model.config().layers, static_cast<int64_t>(prompt.tokens.size()) + most_ - 1),
        next_(torch::tensor(prompt.tokens, torch::kLong).unsqueeze(0)) {}

  bool is_over() const { return is_over_; }
  const std::vector<int32_t>& tokens() const { return tokens_; }

  int32_t step() {
    const torch::Tensor logits = model_.next_logits(next_.to(device_), cache_);
    const int32_t token = sampler_.choose(logits[0]);
    tokens_.push_back(token);
    next_ = torch::full({1, 1}, token, torch::kLong);
    const auto& ends = options_.end_tokens;
    is_over_ = static_cast<int64_t>(tokens_.size()) >= most_ ||
               std::find(ends.begin(), ends.end(), token) != ends.end();
    return token;
  }

 private:
  LanguageModel& model_;
  const GenerationOptions& options_;
  const torch::Device device_;
  Sampler sampler_;
  const int64_t most_;
  KeyValueCache cache_;
  torch::Tensor next_;  // [1, tokens]: what the cache does not have yet
  std::vector<int32_t> tokens_;
  bool is_over_ = false;
};

void check_on_all_ranks(const WrappedModel& model, const std::vector<Prompt>& prompts) {
  std::string error;
  try {
    for (const Prompt& prompt : prompts) check_prompt(model->config(), prompt.tokens);
  } catch (const std::exception& caught) {
    error = zeropage::memory::message_of(caught);
  }
  for (const std::string& of_rank : model.world().gather_text("prompts", error)) {
    if (!of_rank.empty()) throw std::runtime_error(of_rank);
  }
}

}  // namespace

void check_prompt(const ModelConfig& config, const std::vector<int32_t>& prompt) {
  const auto tokens = static_cast<int64_t>(prompt.size());
  TORCH_CHECK(tokens > 0, "the prompt has no token; give it some text");
  TORCH_CHECK(tokens < longest_sequence(config), "the prompt has ", tokens,
              " tokens, and the model's sequences ", longest_sequence(config),
              ", so there is no room for an answer");
  for (const int32_t token : prompt) {
    TORCH_CHECK(token >= 0 && token < config.vocabulary, "the prompt has token ", token,
                ", and the model's vocabulary ends at ", config.vocabulary - 1,
                "; give the model's own tokenizer");
  }
}

std::vector<std::vector<int32_t>> generate(
    WrappedModel& model, const std::vector<Prompt>& prompts, const GenerationOptions& options,
    const std::function<void(size_t prompt, int32_t token)>& on_token) {
  check_on_all_ranks(model, prompts);
  const torch::NoGradGuard no_grad;
  const bool was_training = model.is_training();
  model.eval();
  const zeropage::comm::World& world = model.world();
  std::vector<std::vector<int32_t>> answers;
  std::optional<Answer> current;
  while (true) {
    if (!current && answers.size() < prompts.size()) {
      current.emplace(*model.module(), prompts[answers.size()], options, world.device());
    }
    const bool is_any = world.size() == 1 ? current.has_value() : world.max(current ? 1 : 0) > 0;
    if (!is_any) break;
    if (!current) {
      // For the ranks that still answer, whose operators gather parameters.
      KeyValueCache none(model->config().layers, 1);
      model->next_logits(
          torch::zeros({1, 1}, torch::TensorOptions(torch::kLong).device(world.device())), none);
      continue;
    }
    const int32_t token = current->step();
    if (on_token) on_token(answers.size(), token);
    if (!current->is_over()) continue;
    answers.push_back(current->tokens());
    current.reset();
  }
  model.train(was_training);
  return answers;
}

}  // namespace language_model
