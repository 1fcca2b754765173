#include <iostream>
#include <memory>

#include <CLI/CLI.hpp>
#include <zeropage/bytes.h>

#include "command_line/command_line.h"
#include "language_model/program/commands.h"
#include "language_model/program/run_flags.h"
#include "language_model/weights/random_model.h"
#include "progress/words.h"

namespace zp_lm {
namespace {

struct InitFlags {
  std::string config;
  std::string out;
  std::string dtype = "fp32";
  language_model::RandomModelOptions options;
};

int init(const InitFlags& flags) {
  language_model::RandomModelOptions options = flags.options;
  options.dtype = dtype_of(flags.dtype);
  const auto made = language_model::write_random_model(
      flags.out, language_model::read_config(flags.config), options);
  std::cout << "wrote " << flags.out << ": "
            << examples::fixed(static_cast<double>(made.parameters) / 1e6, 1) << " M parameters, "
            << zeropage::format_bytes(made.bytes) << " in "
            << (made.files == 1 ? std::string("a file") : std::to_string(made.files) + " files")
            << "; highest resident memory "
            << zeropage::format_bytes(zeropage::memory::peak_resident_bytes()) << std::endl;
  return 0;
}

}  // namespace

Command init_command(CLI::App& app) {
  const auto flags = std::make_shared<InitFlags>();
  CLI::App* const command = app.add_subcommand(
      "init", "Writes a model of that shape with random weights, a tensor at a time");
  command->option_defaults()->always_capture_default();
  command->add_option("--config", flags->config, "A config.json, as Hugging Face has it")
      ->required();
  command
      ->add_option("-o,--out", flags->out,
                   "Folder for config.json and safetensors, which has no model yet")
      ->required();
  command->add_option("--dtype", flags->dtype, "What the weights are stored in")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
  command->add_option("--seed", flags->options.seed, "The same weights for the same seed");
  examples::add_bytes(*command, "--file-bytes", flags->options.file_bytes, 1,
                      "The most bytes of a file; more become several files with an index");
  return {command, [flags] { return init(*flags); }};
}

}  // namespace zp_lm
