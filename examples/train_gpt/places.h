// Where a rank trains: which samples, and which slices of the model.
#pragma once

#include <optional>

#include "examples/train_gpt/flags.h"
#include "zero/zeropage.h"

namespace train_gpt {

struct Places {
  zeropage::World all;
  zeropage::World data;  // those that have this rank's slices, and other samples
  // "data", and "tensor": those that compute this rank's samples with it. None where there are no others.
  std::optional<zeropage::Mesh> mesh;

  // --tensor: neighbours. Collective; throws where they do not divide the ranks.
  static Places of(const zeropage::World& world, const Flags& flags);

  bool is_first() const { return all.rank() == 0; }
};

}  // namespace train_gpt
