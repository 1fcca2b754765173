// ResNet-50 over two ranks: on one rank, naive, and pipelined by split size.
//
//   model_parallel --ranks 2 --svg model_parallel.svg
#include <exception>
#include <iostream>

#include <zeropage/check.h>

#include "model_parallel/figures.h"
#include "model_parallel/flags.h"
#include "model_parallel/training.h"
#include "output_files/output_files.h"

namespace model_parallel {
namespace {

void show(const Flags& flags, const std::vector<Figures>& sides) {
  for (const Figures& side : sides) std::cout << table(side);
  if (!flags.svg.empty()) examples::write_output({"--svg", flags.svg}, chart(sides));
}

int start(const Flags& flags) {
  examples::check_outputs({{"--json", flags.json}, {"--svg", flags.svg}});
  if (!flags.drawn.empty()) {
    std::vector<Figures> sides;
    for (const std::string& file : flags.drawn) sides.push_back(read(file));
    check_alike(sides);
    show(flags, sides);
    return 0;
  }
  const auto run = [&](zeropage::World& world) {
    torch::set_num_threads(flags.threads);
    const Figures figures = measure(flags, world);
    if (world.rank() != 0) return 0;
    if (!flags.json.empty()) write(flags.json, figures);
    show(flags, {figures});
    return 0;
  };
  return zeropage::World::launch(flags.ranks, run, {},
                                 {.output = zeropage::LaunchOptions::Output::kRankZeroBare});
}

}  // namespace
}  // namespace model_parallel

int main(int argc, char** argv) {
  const model_parallel::Flags flags = model_parallel::read_flags(argc, argv);
  try {
    return model_parallel::start(flags);
  } catch (const std::exception& error) {
    std::cerr << "model_parallel: " << zeropage::message_of(error) << '\n';
    return 1;
  }
}
