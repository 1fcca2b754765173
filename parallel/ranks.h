// A world as an argument of an operator that LibTorch's dispatcher calls.
#pragma once

#include <utility>

#include <torch/custom_class.h>

#include "comm/communicator.h"
#include "comm/world.h"

namespace zeropage::parallel {

class Ranks : public torch::CustomClassHolder {
 public:
  explicit Ranks(comm::World of_world) : world(std::move(of_world)) {}
  const comm::World world;
};
using RanksPointer = c10::intrusive_ptr<Ranks>;

inline RanksPointer ranks_of(const comm::World& world) {
  return c10::make_intrusive<Ranks>(world);
}

}  // namespace zeropage::parallel
