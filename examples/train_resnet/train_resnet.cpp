// ResNet-18 on Fashion-MNIST: one rank, ranks as threads of one process, ranks as processes.
//
//   train_resnet --ranks 2 --as-threads
#include <algorithm>
#include <exception>
#include <iostream>
#include <thread>

#include "examples/train_resnet/figures.h"
#include "examples/train_resnet/flags.h"
#include "examples/train_resnet/training.h"
#include "memory/check.h"

namespace train_resnet {
namespace {

int threads_of(const Flags& flags, int local_ranks) {
  if (flags.threads > 0) return flags.threads;
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / local_ranks);
}

void run(const Flags& flags, zeropage::World& world, const std::string& kind) {
  if (!flags.as_threads) torch::set_num_threads(threads_of(flags, world.local_size()));
  const std::string way =
      c10::str(world.size(), " ", kind, world.size() == 1 ? "" : (kind == "process" ? "es" : "s"));
  const Figures figures = train(flags, world, way);
  if (world.rank() != 0) return;
  if (!flags.table.empty()) std::cout << added_to_table(flags.table, figures);
  std::cout << "weights_sha256 " << figures.weights_sha256 << std::endl;
}

int start(const Flags& flags) {
  if (zeropage::launched_by_environment()) {
    ZP_CHECK(!flags.as_threads,
             "--as-threads: a launcher has started the ranks as processes already; leave it out");
    auto world = zeropage::World::from_environment();
    run(flags, world, "process");
    return 0;
  }
  if (flags.as_threads) {
    zeropage::World::threads(flags.ranks,
                             [&](zeropage::World& world) { run(flags, world, "thread"); }, {},
                             {.threads_per_rank = threads_of(flags, flags.ranks)});
    return 0;
  }
  return zeropage::World::launch(flags.ranks, [&](zeropage::World& world) {
    run(flags, world, "process");
    return 0;
  });
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
