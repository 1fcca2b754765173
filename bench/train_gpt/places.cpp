#include "bench/train_gpt/places.h"

namespace train_gpt {

Places Places::of(const zeropage::World& world, const Flags& flags) {
  if (flags.ranks_of_sample() == 1) {
    return {.all = world, .data = world, .samples = world, .mesh = {}};
  }
  const zeropage::Mesh mesh(world, {{"pipeline", flags.pipeline},
                                    {"data", world.size() / flags.ranks_of_sample()},
                                    {"context", flags.context},
                                    {"tensor", flags.tensor}});
  return {.all = world, .data = mesh["data"], .samples = mesh.samples(), .mesh = mesh};
}

}  // namespace train_gpt
