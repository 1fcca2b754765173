// Trains an image classifier as its configuration says, on one rank or many.
//
//   train_imagenet --config resnet18.yaml --ranks 2 OUT_DIR /tmp/run TRAIN.EPOCHS 2
#include <algorithm>
#include <chrono>
#include <exception>
#include <iostream>
#include <thread>

#include <CLI/CLI.hpp>
#include <zeropage/check.h>

#include "command_line/stop_signal.h"
#include "train_imagenet/config_file.h"
#include "train_imagenet/training.h"

namespace train_imagenet {
namespace {

struct CommandLine {
  std::string config;
  int ranks = 1;
  std::vector<std::string> overrides;
};

// What local ranks get after SIGTERM or SIGINT to end their step and save.
constexpr std::chrono::minutes kGraceOfSave{5};

int run_rank(const Config& config, zeropage::World& world) {
  const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  torch::set_num_threads(config.run.threads > 0 ? static_cast<int>(config.run.threads)
                                                : std::max(1, cores / world.local_size()));
  // A network of yours: models.add("name", ...).
  const auto models = image_models::ModelRegistry::standard();
  const auto [hash, signal] = run(config, models, world);
  if (signal != 0) return examples::exit_code_of(signal);
  if (world.rank() == 0) std::cout << "weights_sha256 " << hash << std::endl;
  return 0;
}

int start(const CommandLine& line) {
  const Config config = read_config(line.config, line.overrides);
  zeropage::WorldOptions options;
  if (config.run.device == DeviceName::kCuda) options.device = c10::kCUDA;
  if (zeropage::launched_by_environment()) {
    auto world = zeropage::World::from_environment(options);
    return run_rank(config, world);
  }
  check(config, line.ranks);
  return zeropage::World::launch(line.ranks,
                                 [&](zeropage::World& world) { return run_rank(config, world); },
                                 options, {.grace = kGraceOfSave});
}

// Takes the pairs KEY VALUE out of the command line: the parser takes brackets apart, and a value such as
// -0.5 for a flag. Returns the others from the last to the first, as the parser wants them.
std::vector<std::string> without_pairs(int argc, char** argv, std::vector<std::string>& pairs) {
  std::vector<std::string> flags;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const bool is_flag = word.starts_with("-");
    auto& to = is_flag ? flags : pairs;
    to.push_back(word);
    const bool has_value = !is_flag || word == "--config" || word == "--ranks";
    if (has_value && i + 1 < argc) to.emplace_back(argv[++i]);
  }
  std::reverse(flags.begin(), flags.end());
  return flags;
}

}  // namespace
}  // namespace train_imagenet

int main(int argc, char** argv) {
  train_imagenet::CommandLine line;
  CLI::App app(
      "Trains an image classifier. Behind the flags: KEY VALUE pairs, such as TRAIN.EPOCHS 5");
  app.add_option("--config", line.config, "YAML file of keys");
  app.add_option("--ranks", line.ranks, "Local ranks to start, unless a launcher did")
      ->check(CLI::Range(1, 64));
  app.add_flag_callback(
      "--keys",
      [] {
        std::cout << train_imagenet::keys_table();
        std::exit(0);
      },
      "prints the table of keys");
  app.footer("KEY VALUE ...: a list is one value, such as \"[0.5, 0.5]\"; --keys lists the keys");
  try {
    std::vector<std::string> flags = train_imagenet::without_pairs(argc, argv, line.overrides);
    app.parse(flags);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  try {
    return train_imagenet::start(line);
  } catch (const train_imagenet::ConfigError& error) {
    std::cerr << "train_imagenet: " << error.what() << '\n';
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "train_imagenet: " << zeropage::memory::message_of(error) << '\n';
    return 1;
  }
}
