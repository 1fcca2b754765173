#include <cstdint>
#include <mutex>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include "operators/generator_state.h"
#include "zeropage/parallel_layers.h"

namespace zeropage::parallel {
namespace {

uint64_t draw(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get<at::CPUGeneratorImpl>()->random64();
}

// splitmix64 (Steele et al. 2014): neighbours get seeds that have nothing in common.
uint64_t mixed(uint64_t drawn, int rank) {
  uint64_t z = drawn + (static_cast<uint64_t>(rank) + 1) * 0x9E3779B97F4A7C15ULL;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

}  // namespace

RandomOfRank::RandomOfRank(const comm::World& world) {
  const at::Generator host = at::globalContext().defaultGenerator(at::kCPU);
  const uint64_t seed = mixed(draw(host), world.rank());
  std::vector<at::Generator> generators = {host};
  if (world.device().is_cuda()) {
    generators.push_back(at::globalContext().defaultGenerator(world.device()));
  }
  for (at::Generator& generator : generators) {
    outside_.push_back({generator, operators::copy_of(generator)});
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(seed);
  }
}

RandomOfRank::~RandomOfRank() {
  for (const Outside& outside : outside_) {
    operators::assign_state(outside.generator, outside.state);
  }
}

}  // namespace zeropage::parallel
