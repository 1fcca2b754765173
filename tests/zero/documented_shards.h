// What docs/metrics_and_shards.md shows is between the marks.
#pragma once

#include <cmath>
#include <map>
#include <string>

#include <torch/torch.h>

#include "zero/zeropage.h"

namespace zeropage::documented {

// [documented]
// Scales each parameter so that its norm is at most `most`. On all ranks, at stages 1 to 3.
const auto cap_norms = [](zeropage::DistributedDataParallelBase& model, double most) {
  std::map<std::string, double> squares;
  zeropage::visit_owned_shards(model, [&](const zeropage::OwnedShard& shard) {
    squares[shard.name] = shard.exact.to(torch::kDouble).square().sum().item<double>();
  });
  for (auto& [name, square] : squares) square = model.world().sum(square);
  zeropage::assign_owned_shards(model, [&](const zeropage::OwnedShard& shard) {
    const double norm = std::sqrt(squares.at(shard.name));
    return norm > most ? shard.exact * (most / norm) : torch::Tensor();
  });
};
// [/documented]

}  // namespace zeropage::documented
