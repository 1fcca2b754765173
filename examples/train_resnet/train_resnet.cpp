// ResNet-18 on Fashion-MNIST: one rank, ranks as threads of one process, ranks as processes.
//
//   train_resnet --ranks 2 --as-threads
#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <iostream>
#include <optional>
#include <thread>

#include <zeropage/check.h>

#include "command_line/stop_signal.h"
#include "output_files/output_files.h"
#include "train_resnet/figures.h"
#include "train_resnet/flags.h"
#include "train_resnet/training.h"

namespace train_resnet {
namespace {

constexpr const char* kProcess = "process";
constexpr const char* kThread = "thread";

int threads_of(const Flags& flags, int local_ranks) {
  if (flags.threads > 0) return flags.threads;
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / local_ranks);
}

// What local ranks get after SIGTERM or SIGINT to end their step and save.
constexpr std::chrono::minutes kGraceOfSave{5};

zeropage::WorldOptions world_options(const Flags& flags) {
  zeropage::WorldOptions options;
  if (flags.device == "cuda") options.device = c10::kCUDA;
  return options;
}

// "2 threads", "4 by Slurm"
std::string way_of(const zeropage::World& world, const std::string& launcher, const char* kind) {
  if (launcher == "torchrun" || launcher == "Slurm" || launcher == "Open MPI") {
    return c10::str(world.size(), " by ", launcher);
  }
  return c10::str(world.size(), " ", kind,
                  world.size() == 1 ? "" : (kind == kProcess ? "es" : "s"));
}

int run(const Flags& flags, zeropage::World& world, const std::string& way) {
  if (!flags.as_threads) torch::set_num_threads(threads_of(flags, world.local_size()));
  const auto [figures, signal] = train(flags, world, way);
  if (!figures) return examples::exit_code_of(signal);
  if (world.rank() != 0) return 0;
  if (!flags.json.empty()) write_json(flags.json, *figures);
  if (!flags.table.empty()) std::cout << added_to_table(flags.table, *figures);
  std::cout << "weights_sha256 " << figures->weights_sha256 << std::endl;
  return 0;
}

int start(const Flags& flags) {
  examples::check_outputs({{"--json", flags.json}, {"--table", flags.table}});
  if (zeropage::launched_by_environment()) {
    ZP_CHECK(!flags.as_threads,
             "--as-threads: a launcher has started the ranks as processes already; leave it out");
    auto world = zeropage::World::from_environment(world_options(flags));
    return run(flags, world, way_of(world, zeropage::comm::read_place().launcher, kProcess));
  }
  if (flags.as_threads) {
    std::atomic<int> code = 0;
    zeropage::World::threads(
        flags.ranks,
        [&](zeropage::World& world) { code = run(flags, world, way_of(world, "", kThread)); },
        world_options(flags), {.threads_per_rank = threads_of(flags, flags.ranks)});
    return code;
  }
  return zeropage::World::launch(
      flags.ranks,
      [&](zeropage::World& world) { return run(flags, world, way_of(world, "", kProcess)); },
      world_options(flags),
      {.grace = flags.save.empty() ? zeropage::comm::LaunchOptions().grace : kGraceOfSave});
}

}  // namespace
}  // namespace train_resnet

int main(int argc, char** argv) {
  const train_resnet::Flags flags = train_resnet::read_flags(argc, argv);
  try {
    return train_resnet::start(flags);
  } catch (const std::exception& error) {
    std::cerr << "train_resnet: " << zeropage::message_of(error) << '\n';
    return 1;
  }
}
