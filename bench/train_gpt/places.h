// Where a rank trains: which samples, and which slices of the model.
#pragma once

#include <optional>

#include "bench/train_gpt/flags.h"
#include "zeropage/zeropage.h"

namespace train_gpt {

struct Places {
  zeropage::World all;
  zeropage::World
      data;  // those that have this rank's slices, layers and place in a sample, and other samples
  zeropage::World samples;  // and those that have the other tokens of their samples
  // "pipeline", those that have the other layers; "data"; "context", those that have the other tokens; and "tensor", those that
  // compute this rank's tokens with it. None where all ranks have other samples.
  std::optional<zeropage::Mesh> mesh;

  // --tensor: neighbours; --context: those next to them. Collective; throws where they do not divide the ranks.
  static Places of(const zeropage::World& world, const Flags& flags);

  bool is_first() const { return all.rank() == 0; }
  // Null where there are no others along it.
  const zeropage::World* along(const char* axis) const {
    return mesh && (*mesh)[axis].size() > 1 ? &(*mesh)[axis] : nullptr;
  }
};

}  // namespace train_gpt
