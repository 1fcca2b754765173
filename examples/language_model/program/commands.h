// The commands of zp-lm. Each adds its flags to the command line and returns what runs it: its exit code.
#pragma once

#include <functional>

namespace CLI {
class App;
}

namespace zp_lm {

struct Command {
  CLI::App* app = nullptr;  // of CLI11, that knows whether it was named
  std::function<int()> run;
};

Command eval_command(CLI::App& app);
Command generate_command(CLI::App& app);
Command export_command(CLI::App& app);
// Files of a model with random weights.
Command init_command(CLI::App& app);
// One trainer: all weights of a model, adapters beside frozen weights, or all weights from the beginning.
Command finetune_command(CLI::App& app);
Command lora_command(CLI::App& app);
Command pretrain_command(CLI::App& app);

}  // namespace zp_lm
