#include <iostream>
#include <memory>

#include <CLI/CLI.hpp>
#include <zeropage/bytes.h>

#include "language_model/program/commands.h"
#include "language_model/program/run_flags.h"
#include "language_model/weights/export.h"
#include "language_model/weights/open_model.h"

namespace zp_lm {
namespace {

struct ExportFlags {
  ModelFlags model;
  RunFlags run;
  std::string out;
  std::string export_dtype;
};

int export_on(const ExportFlags& flags, const zeropage::World& world) {
  const int64_t before = zeropage::memory::peak_resident_bytes();
  const language_model::ModelFiles files(flags.model.model);
  auto model = language_model::open_model(files, world,
                                          {.sharding = sharding_of(flags.run),
                                           .adapters_from = flags.model.adapters,
                                           .is_frozen = true});
  const std::string note =
      language_model::export_model(flags.out, model,
                                   {.dtype = export_dtype_of(flags.export_dtype),
                                    .tokenizer_from = tokenizer_path(flags.model)});
  const OpeningCost cost =
      opening_cost(world, language_model::count_parameters(files.config()), before);
  if (world.rank() != 0) return 0;
  std::cout << cost.words() << "\nwrote " << flags.out << std::endl;
  if (!note.empty()) std::cout << note << std::endl;
  return 0;
}

}  // namespace

Command export_command(CLI::App& app) {
  const auto flags = std::make_shared<ExportFlags>();
  CLI::App* const command = app.add_subcommand(
      "export", "Writes a model as Hugging Face has it, with its adapters merged");
  command->option_defaults()->always_capture_default();
  add_model_flags(*command, flags->model);
  command->add_option("-o,--out", flags->out, "Folder for config.json and model.safetensors")
      ->required();
  add_export_dtype(*command, flags->export_dtype);
  add_run_flags(*command, flags->run);
  return {command, [flags] {
            // Flags that contradict each other are refused before a folder is made.
            sharding_of(flags->run);
            check_out(flags->out, flags->model);
            return on_ranks(flags->run,
                            [&](zeropage::World& world) { return export_on(*flags, world); });
          }};
}

}  // namespace zp_lm
