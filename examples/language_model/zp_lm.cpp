// Language models of real weights, over sharded ranks: training, loss, generation, export.
//
//   zp-lm finetune --model SmolLM2-135M.gguf --text austen/*.txt --ranks 2 --out tuned
//   zp-lm lora --model SmolLM2-135M.gguf --text austen/*.txt --rank 8 --ranks 2 --out adapters
//   zp-lm eval --model SmolLM2-135M.gguf --text prideprejudice.txt --ranks 2
//   zp-lm generate --model SmolLM2-135M.gguf --prompt "Photosynthesis is the process by which"
#include <exception>
#include <iostream>
#include <optional>

#include <CLI/CLI.hpp>
#include <zeropage/names.h>

#include "command_line/command_line.h"
#include "language_model/program/commands.h"

int main(int argc, char** argv) {
  CLI::App app("Language models of real weights, over sharded ranks", "zp-lm");
  app.require_subcommand(1);
  const zp_lm::Command commands[] = {zp_lm::finetune_command(app), zp_lm::lora_command(app),
                                     zp_lm::pretrain_command(app), zp_lm::eval_command(app),
                                     zp_lm::generate_command(app), zp_lm::export_command(app),
                                     zp_lm::init_command(app)};
  if (const std::optional<int> ended = examples::parse(app, argc, argv)) return *ended;
  try {
    for (const zp_lm::Command& command : commands) {
      if (command.app->parsed()) return command.run();
    }
  } catch (const CLI::ValidationError& error) {
    std::cerr << error.what() << '\n';
    return examples::kUsageError;
  } catch (const std::exception& error) {
    std::cerr << "zp-lm: " << zeropage::message_of(error) << '\n';
    return 1;
  }
  return examples::kUsageError;
}
