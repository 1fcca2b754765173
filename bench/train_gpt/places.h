// Where a rank trains: which samples, and which slices of the model.
#pragma once

#include <optional>

#include "bench/train_gpt/flags.h"
#include "zeropage/zeropage.h"

namespace train_gpt {

struct Places {
  zeropage::World all;
  // Those that have this rank's slices and layers, and other tokens: of other samples, and of their samples.
  zeropage::World samples;
  int ranks_of_tokens = 1;  // of them, neighbours, that share a sample's tokens
  // "pipeline", those that have the other layers; "data" and "expert", those that have other samples; "context", those that have
  // the other tokens; and "tensor", those that compute this rank's tokens with it. None where all ranks have other samples and
  // all experts.
  std::optional<zeropage::Mesh> mesh;

  // --tensor: neighbours; --context: those next to them; --expert-parallel: the next. Collective; throws where they do not
  // divide the ranks.
  static Places of(const zeropage::World& world, const Flags& flags);

  // Which samples this rank has, of how many.
  int sample_place() const { return samples.rank() / ranks_of_tokens; }
  int sample_places() const { return samples.size() / ranks_of_tokens; }
  bool is_first() const { return all.rank() == 0; }
  // Null where there are no others along it.
  const zeropage::World* along(const char* axis) const {
    return mesh && (*mesh)[axis].size() > 1 ? &(*mesh)[axis] : nullptr;
  }
};

}  // namespace train_gpt
