#include <iostream>
#include <memory>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <zeropage/bytes.h>

#include "command_line/command_line.h"
#include "language_model/evaluate/evaluation.h"
#include "language_model/program/commands.h"
#include "language_model/program/run_flags.h"
#include "language_model/weights/open_model.h"
#include "output_files/output_files.h"
#include "progress/words.h"

namespace zp_lm {
namespace {

struct EvalFlags {
  ModelFlags model;
  RunFlags run;
  std::string text;
  std::string from;
  int64_t tokens = 0;  // 0: all
  int64_t window = 0;  // 0: as long as the model takes, up to kWindow
  int64_t batch = 1;
};

constexpr int64_t kWindow = 1024;

int evaluate_on(const EvalFlags& flags, const zeropage::World& world) {
  const int64_t before = zeropage::memory::peak_resident_bytes();
  const language_model::ModelFiles files(flags.model.model);
  const auto tokenizer = tokenizer_of(flags.model, files);
  std::vector<int32_t> ids = tokenizer.encode(read_text(flags.text, flags.from));
  if (flags.tokens > 0 && flags.tokens < static_cast<int64_t>(ids.size())) {
    ids.resize(static_cast<size_t>(flags.tokens));
  }
  auto model = language_model::open_model(files, world,
                                          {.sharding = sharding_of(flags.run),
                                           .adapters_from = flags.model.adapters,
                                           .is_frozen = true});
  const OpeningCost cost =
      opening_cost(world, language_model::count_parameters(files.config()), before);
  const int64_t window = flags.window > 0
                             ? flags.window
                             : std::min(kWindow, language_model::longest_sequence(files.config()));
  const auto loss = language_model::evaluate(model, ids, window, flags.batch);
  if (world.rank() != 0) return 0;
  std::cout << cost.words() << "\nloss " << examples::fixed(loss.loss, 6) << ", perplexity "
            << examples::fixed(loss.perplexity(), 3) << ", over " << loss.tokens << " tokens"
            << std::endl;
  if (flags.run.json.empty()) return 0;
  const nlohmann::json json = {{"loss", loss.loss},
                               {"perplexity", loss.perplexity()},
                               {"tokens", loss.tokens},
                               {"window", window},
                               {"ranks", world.size()},
                               {"stage", flags.run.stage},
                               {"parameters", cost.parameters},
                               {"resident_bytes_before_opening", cost.resident_before},
                               {"peak_resident_bytes_of_opening", cost.resident_peak}};
  examples::write_output({"--json", flags.run.json}, json.dump(2) + "\n");
  return 0;
}

}  // namespace

Command eval_command(CLI::App& app) {
  const auto flags = std::make_shared<EvalFlags>();
  CLI::App* const command =
      app.add_subcommand("eval", "The loss and perplexity of a model on a text");
  command->option_defaults()->always_capture_default();
  add_model_flags(*command, flags->model);
  command->add_option("--text", flags->text, "A file of text")->required()->group("Text");
  command->add_option("--from", flags->from, "Begin where this stands first in the file")
      ->group("Text");
  command->add_option("--tokens", flags->tokens, "The first tokens of it alone; 0: all")
      ->check(examples::non_negative())
      ->group("Text");
  command
      ->add_option("--window", flags->window,
                   "Tokens that the model sees at once; 0: up to 1024, as it can")
      ->check(examples::non_negative())
      ->group("Text");
  command->add_option("--batch", flags->batch, "Windows of one forward")
      ->check(examples::positive())
      ->group("Text");
  add_run_flags(*command, flags->run);
  return {command, [flags] {
            examples::check_outputs({{"--json", flags->run.json}});
            return on_ranks(flags->run,
                            [&](zeropage::World& world) { return evaluate_on(*flags, world); });
          }};
}

}  // namespace zp_lm
