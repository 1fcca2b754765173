#include <algorithm>
#include <chrono>
#include <fstream>
#include <iostream>
#include <memory>
#include <stdexcept>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <zeropage/check.h>
#include <zeropage/names.h>

#include "command_line/command_line.h"
#include "language_model/generate/generation.h"
#include "language_model/program/commands.h"
#include "language_model/program/run_flags.h"
#include "language_model/weights/open_model.h"
#include "output_files/output_files.h"
#include "progress/words.h"

namespace zp_lm {
namespace {

using language_model::Prompt;

struct GenerateFlags {
  ModelFlags model;
  RunFlags run;
  std::vector<std::string> prompts;
  std::string prompts_file;
  bool begin_token = false;
  bool past_end = false;
  bool is_chat = false;
  std::string system;
  uint64_t seed = 0;
  language_model::GenerationOptions options;
};

struct Text {
  std::string text;
  std::string where;  // for errors: "prompts.txt:3"
};

std::vector<Text> texts_of(const GenerateFlags& flags) {
  std::vector<Text> texts;
  for (const std::string& prompt : flags.prompts) {
    texts.push_back({prompt, "--prompt " + std::to_string(texts.size() + 1)});
  }
  if (!flags.prompts_file.empty()) {
    std::ifstream file(flags.prompts_file);
    ZP_CHECK(file, flags.prompts_file, ": cannot be read");
    int64_t number = 0;
    for (std::string line; std::getline(file, line);) {
      texts.push_back({line, flags.prompts_file + ":" + std::to_string(++number)});
    }
  }
  ZP_CHECK(!texts.empty(), "no prompt: give --prompt TEXT, or --prompts FILE with a line");
  return texts;
}

class Answering {
 public:
  Answering(const GenerateFlags& flags, const zeropage::World& world)
      : flags_(flags),
        world_(world),
        files_(flags.model.model),
        tokenizer_(tokenizer_of(flags.model, files_)),
        texts_(texts_of(flags)),
        // One prompt: all ranks compute its answer together. Several: ranks take turns.
        is_single_(texts_.size() == 1) {
    // Every rank looks at all of them, so that none begins to answer where another cannot.
    for (size_t i = 0; i < texts_.size(); ++i) {
      Prompt prompt = checked_prompt(i);
      const bool is_mine =
          is_single_ || i % static_cast<size_t>(world.size()) == static_cast<size_t>(world.rank());
      if (!is_mine) continue;
      mine_.push_back(i);
      prompts_.push_back(std::move(prompt));
    }
  }

  int run() {
    auto model = language_model::open_model(files_, world_,
                                            {.sharding = sharding_of(flags_.run),
                                             .adapters_from = flags_.model.adapters,
                                             .is_frozen = true});
    language_model::GenerationOptions options = flags_.options;
    if (!flags_.past_end) {
      options.end_tokens = files_.config().end_tokens;
      if (flags_.is_chat) {
        options.end_tokens.push_back(
            zeropage::text::answer_end(tokenizer_, chat_template_of(tokenizer_)));
      }
    }
    zeropage::text::StreamDecoder stream(tokenizer_);
    const bool streams = is_single_ && world_.rank() == 0;
    if (streams && !flags_.is_chat) std::cout << texts_[0].text << std::flush;
    const auto start = std::chrono::steady_clock::now();
    const auto answers = generate(model, prompts_, options, [&](size_t /*prompt*/, int32_t token) {
      if (streams && !tokenizer_.is_special(token)) std::cout << stream.add(token) << std::flush;
    });
    seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (streams) std::cout << stream.finish() << std::endl;
    report(answers);
    return 0;
  }

 private:
  Prompt checked_prompt(size_t index) const {
    Prompt prompt{.tokens = tokens_of(texts_[index].text), .seed = flags_.seed + index};
    if (flags_.begin_token) {
      const auto begin = files_.config().begin_token;
      ZP_CHECK(begin, "--begin-token: the model's config names none");
      prompt.tokens.insert(prompt.tokens.begin(), static_cast<int32_t>(*begin));
    }
    try {
      language_model::check_prompt(files_.config(), prompt.tokens);
    } catch (const std::exception& error) {
      throw std::runtime_error(texts_[index].where + ": " + zeropage::message_of(error));
    }
    return prompt;
  }

  std::vector<int32_t> tokens_of(const std::string& text) const {
    if (!flags_.is_chat) return tokenizer_.encode(text);
    const std::vector<zeropage::text::ChatMessage> messages = {{"user", text}};
    return zeropage::text::chat_prompt(
        messages, tokenizer_, {.format = chat_template_of(tokenizer_), .system = flags_.system});
  }

  nlohmann::json json_of(size_t index, const std::vector<int32_t>& answer) const {
    std::vector<int32_t> shown;
    std::copy_if(answer.begin(), answer.end(), std::back_inserter(shown),
                 [&](int32_t token) { return !tokenizer_.is_special(token); });
    return {{"index", mine_[index]},
            {"prompt", texts_[mine_[index]].text},
            {"answer", tokenizer_.decode(shown)},
            {"prompt_tokens", prompts_[index].tokens.size()},
            {"tokens", answer}};
  }

  // In the order of the prompts, on rank 0.
  void report(const std::vector<std::vector<int32_t>>& answers) const {
    nlohmann::json own = nlohmann::json::array();
    for (size_t i = 0; i < answers.size(); ++i) own.push_back(json_of(i, answers[i]));
    if (is_single_ && world_.rank() != 0) own.clear();
    // Bytes that are no UTF-8 become marks.
    const std::string text = own.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    std::vector<nlohmann::json> all;
    for (const std::string& of_rank : world_.gather_text("answers", text)) {
      for (auto& answer : nlohmann::json::parse(of_rank)) all.push_back(std::move(answer));
    }
    if (world_.rank() != 0) return;
    std::sort(all.begin(), all.end(),
              [](const auto& left, const auto& right) { return left["index"] < right["index"]; });
    size_t tokens = 0;
    for (const nlohmann::json& answer : all) {
      tokens += answer["tokens"].size();
      if (is_single_) continue;
      std::cout << answer["prompt"].get<std::string>() << (flags_.is_chat ? "\n" : "")
                << answer["answer"].get<std::string>() << "\n---" << std::endl;
    }
    const double rate = static_cast<double>(tokens) / seconds_;
    std::cerr << tokens << " tokens, " << examples::fixed(rate, 1) << " a second" << std::endl;
    if (flags_.run.json.empty()) return;
    const nlohmann::json json = {
        {"answers", all}, {"seconds", seconds_}, {"tokens_per_second", rate}};
    examples::write_output({"--json", flags_.run.json}, json.dump(2) + "\n");
  }

  const GenerateFlags& flags_;
  const zeropage::World& world_;
  const language_model::ModelFiles files_;
  const zeropage::text::Tokenizer tokenizer_;
  const std::vector<Text> texts_;
  const bool is_single_;
  std::vector<size_t> mine_;  // which prompts this rank answers
  std::vector<Prompt> prompts_;
  double seconds_ = 0;
};

}  // namespace

Command generate_command(CLI::App& app) {
  const auto flags = std::make_shared<GenerateFlags>();
  CLI::App* const command = app.add_subcommand(
      "generate", "Continues texts, token by token, also from sharded parameters");
  command->option_defaults()->always_capture_default();
  add_model_flags(*command, flags->model);
  command->add_option("--prompt", flags->prompts, "A text to continue; several: ranks share them")
      ->allow_extra_args(false)
      ->group("Text");
  command->add_option("--prompts", flags->prompts_file, "A file of them, one a line")
      ->group("Text");
  command
      ->add_flag("--chat", flags->is_chat, "A prompt is what a user says, and the model answers it")
      ->group("Text");
  command->add_option("--system", flags->system, "The system's message in front of it")
      ->group("Text");
  command
      ->add_flag("--begin-token", flags->begin_token,
                 "Put the model's token of a text's beginning in front")
      ->group("Text");
  command->add_option("--tokens", flags->options.most_tokens, "The most tokens of an answer")
      ->check(examples::positive())
      ->group("Text");
  command->add_flag("--past-end", flags->past_end, "Go on behind tokens that end an answer")
      ->group("Text");
  auto& sampling = flags->options.sampling;
  command
      ->add_option("--temperature", sampling.temperature,
                   "0: always the most probable token; 1: as the model says")
      ->check(examples::non_negative())
      ->group("Sampling");
  command->add_option("--top-k", sampling.top_k, "Choose from so many most probable ones; 0: all")
      ->check(examples::non_negative())
      ->group("Sampling");
  command
      ->add_option("--top-p", sampling.top_p,
                   "Choose from the fewest most probable ones that together have this probability")
      ->check(CLI::Range(1e-9, 1.0))
      ->group("Sampling");
  command->add_option("--seed", flags->seed, "The same answers for the same seed")
      ->group("Sampling");
  add_run_flags(*command, flags->run);
  return {command, [flags] {
            examples::check_outputs({{"--json", flags->run.json}});
            return on_ranks(flags->run,
                            [&](zeropage::World& world) { return Answering(*flags, world).run(); });
          }};
}

}  // namespace zp_lm
