#include "bench/train_gpt/places.h"

namespace train_gpt {

Places Places::of(const zeropage::World& world, const Flags& flags) {
  if (flags.ranks_of_sample() * flags.experts.parallel == 1) {
    return {.all = world, .samples = world, .mesh = {}};
  }
  const zeropage::Mesh mesh(
      world, {{"pipeline", flags.pipeline},
              {"data", world.size() / (flags.ranks_of_sample() * flags.experts.parallel)},
              {"expert", flags.experts.parallel},
              {"context", flags.context},
              {"tensor", flags.tensor}});
  return {.all = world, .samples = mesh.samples(), .ranks_of_tokens = flags.context, .mesh = mesh};
}

}  // namespace train_gpt
