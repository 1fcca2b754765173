// What docs/metrics_and_shards.md shows is between the marks.
#pragma once

#include <cmath>
#include <map>
#include <string>

#include <torch/torch.h>

#include "zeropage/zeropage.h"

namespace zeropage::documented {

// [documented]
// Scales each parameter so that its norm is at most `most`. On all ranks, at stages 1 to 3. tensor: the mesh's axis of
// that name; null where there is none.
const auto cap_norms = [](zeropage::DistributedDataParallelBase& model, double most,
                          const zeropage::World* tensor) {
  struct Norm {
    double square = 0;
    bool is_slice = false;
  };
  std::map<std::string, Norm> norms;
  zeropage::visit_owned_shards(model, [&](const zeropage::OwnedShard& shard) {
    const double square = shard.exact.to(torch::kDouble).square().sum().item<double>();
    norms[shard.name] = {square, shard.is_slice};
  });
  for (auto& [name, norm] : norms) {
    norm.square = model.world().sum(norm.square);
    if (tensor != nullptr && norm.is_slice) norm.square = tensor->sum(norm.square);
  }
  zeropage::assign_owned_shards(model, [&](const zeropage::OwnedShard& shard) {
    const double norm = std::sqrt(norms.at(shard.name).square);
    return norm > most ? shard.exact * (most / norm) : torch::Tensor();
  });
};
// [/documented]

}  // namespace zeropage::documented
