// Steps of ResNet-50, on one rank and cut over all.
#pragma once

#include <zeropage/zeropage.h>

#include "model_parallel/figures.h"
#include "model_parallel/flags.h"

namespace model_parallel {

// Every way once a round, in turns which goes first. Rank 0 has the figures. Collective.
Figures measure(const Flags& flags, zeropage::World& world);

}  // namespace model_parallel
