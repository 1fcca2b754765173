// One rank's run.
#pragma once

#include <optional>

#include <zeropage/zeropage.h>

#include "train_resnet/figures.h"
#include "train_resnet/flags.h"

namespace train_resnet {

struct Ended {
  std::optional<Figures> figures;  // the same on all ranks but those of time
  int signal = 0;                  // that ended the run after a save; then there are no figures
};

// way: what the ranks are, for the table. Collective.
Ended train(const Flags& flags, zeropage::World& world, const std::string& way);

}  // namespace train_resnet
