// One rank's run.
#pragma once

#include "examples/train_resnet/figures.h"
#include "examples/train_resnet/flags.h"
#include "zero/zeropage.h"

namespace train_resnet {

// way: what the ranks are, for the table. Collective; the figures are the same on all ranks but those of time.
Figures train(const Flags& flags, zeropage::World& world, const std::string& way);

}  // namespace train_resnet
