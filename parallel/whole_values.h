// The whole module that rank 0 drew, of which each rank keeps slices.
#pragma once

#include <string>

#include <torch/nn/module.h>

#include "zeropage/world.h"

namespace zeropage::parallel {

// Gives every rank rank 0's parameters and buffers. Collective. who: for errors.
void take_values_of_rank_zero(const torch::nn::Module& whole, const comm::World& world,
                              const std::string& who);

}  // namespace zeropage::parallel
