// Where a rank trains: which samples, and which slices of the model.
#pragma once

#include <optional>

#include "examples/train_gpt/flags.h"
#include "zero/zeropage.h"

namespace train_gpt {

struct Places {
  zeropage::World all;
  zeropage::World data;  // those that have this rank's slices, and other samples
  std::optional<zeropage::World>
      tensor;  // those that compute its samples with it, if there are others

  // --tensor: neighbours. Collective; throws where they do not divide the ranks.
  static Places of(const zeropage::World& world, const Flags& flags);

  bool is_first() const { return all.rank() == 0; }
};

}  // namespace train_gpt
