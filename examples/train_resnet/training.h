// One rank's run.
#pragma once

#include <optional>

#include "examples/train_resnet/figures.h"
#include "examples/train_resnet/flags.h"
#include "zero/zeropage.h"

namespace train_resnet {

// way: what the ranks are, for the table. Nothing where SIGTERM ended the run after a save. Collective; the figures are the same on all
// ranks but those of time.
std::optional<Figures> train(const Flags& flags, zeropage::World& world, const std::string& way);

}  // namespace train_resnet
