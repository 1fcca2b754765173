// Trains an image classifier as its configuration says, on one rank or many.
//
//   train_imagenet --config resnet18.yaml --ranks 2 OUT_DIR /tmp/run TRAIN.EPOCHS 2
#include <algorithm>
#include <exception>
#include <iostream>
#include <thread>

#include <CLI/CLI.hpp>

#include "examples/train_imagenet/config_file.h"
#include "examples/train_imagenet/training.h"
#include "memory/check.h"

namespace train_imagenet {
namespace {

struct CommandLine {
  std::string config;
  int ranks = 1;
  std::vector<std::string> overrides;
};

void run_rank(const Config& config, zeropage::World& world) {
  const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  torch::set_num_threads(config.run.threads > 0 ? static_cast<int>(config.run.threads)
                                                : std::max(1, cores / world.local_size()));
  // A network of yours: models.add("name", ...).
  const auto models = image_models::ModelRegistry::standard();
  const std::string hash = run(config, models, world);
  if (world.rank() == 0) std::cout << "weights_sha256 " << hash << std::endl;
}

int start(const CommandLine& line) {
  const Config config = read_config(line.config, line.overrides);
  zeropage::WorldOptions options;
  if (config.run.device == DeviceName::kCuda) options.device = c10::kCUDA;
  if (zeropage::launched_by_environment()) {
    auto world = zeropage::World::from_environment(options);
    run_rank(config, world);
    return 0;
  }
  check(config, line.ranks);
  return zeropage::World::launch(
      line.ranks,
      [&](zeropage::World& world) {
        run_rank(config, world);
        return 0;
      },
      options);
}

}  // namespace
}  // namespace train_imagenet

int main(int argc, char** argv) {
  train_imagenet::CommandLine line;
  CLI::App app(
      "Trains an image classifier. Behind the flags: KEY VALUE pairs, such as TRAIN.EPOCHS 5");
  app.add_option("--config", line.config, "a YAML file of keys");
  app.add_option("--ranks", line.ranks, "local ranks to start, unless a launcher did")
      ->check(CLI::Range(1, 64));
  app.add_flag_callback(
      "--keys",
      [] {
        std::cout << train_imagenet::keys_table();
        std::exit(0);
      },
      "prints the table of keys");
  app.add_option("overrides", line.overrides, "KEY VALUE ...");
  try {
    app.parse(argc, argv);
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
