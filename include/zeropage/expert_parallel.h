// `expert_parallel()`: spreads the experts of a module over ranks, to which tokens travel.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "zeropage/mesh.h"
#include "zeropage/options.h"

// Expert parallelism (Lepikhin et al., "GShard", 2020) inside data parallelism, for layers of zeropage/experts.h.
//
//   zeropage::Mesh mesh(world, {{"data", 2}, {"expert", 4}});
//   zeropage::expert_parallel(gpt, mesh);
//   zeropage::DistributedDataParallel<Gpt> model(gpt, mesh, options);
//
// All ranks of the mesh get other samples. The ranks along "expert" have experts / P of each layer between them: tokens
// go to the ranks that have their experts, and results come back. Ranks with the same experts, along "data" and "context",
// share them as a stage of ZeRO shares parameters; all other parameters are shared by all ranks of the mesh. So a rank
// has the same part of every kind of state as without expert parallelism, and whole it has experts / P at once.
//
// Losses, gradients, norms and clipping are those of the module on one rank, up to rounding: the mean over the samples of all ranks. A state
// on disk has whole parameters, and is loaded on any mesh, with or without an axis "expert".
//
// All ranks along "expert" run the same layers in the same order, also those without tokens.

namespace zeropage {

// Bytes that a rank sends for one layer in a forward, its backward and a step, by the formulas of the algorithms (docs/experts.md).
struct ExpertTraffic {
  int64_t tokens = 0;  // where tokens travel to experts
  int64_t weights =
      0;  // where each rank computes all experts for its own tokens, as without an axis "expert"
};

struct PlacedExperts {
  std::string layer = {};      // its name in the module
  bool tokens_travel = false;  // else its experts are left whole
  ExpertTraffic traffic;       // zeros where nobody asked
};
std::ostream& operator<<(std::ostream& stream, const PlacedExperts& placed);

// Cuts all layers of experts. Call it before wrapping and before making optimizers, on all ranks; every rank gets its part of rank 0's
// values along "expert". The module holds whole values until then, and the mesh's worlds from then on. A mesh whose axis "expert" has 1 rank
// leaves the module as it is. Returns a line for each layer.
//
// With `tokens`, those of a rank in one forward, each layer is placed where less travels: its experts are cut, or, where their weights are fewer
// bytes than the tokens, stay whole on every rank.
//
// The module of a DeferredModule is cut before it has values, and each rank keeps its part of them when it is wrapped, a weight of all experts
// of a layer at a time:
//
//   zeropage::DeferredModule<Gpt> deferred([&] { return Gpt(config); });
//   zeropage::expert_parallel(deferred.module(), mesh);
//   zeropage::DistributedDataParallel<Gpt> model(std::move(deferred), mesh, options);
//
// Collective. Throws on all ranks alike for a module without experts, where P does not divide the experts of a layer, where a layer was placed
// before, and where ranks ask for other tokens.
std::vector<PlacedExperts> expert_parallel(torch::nn::Module& module, const comm::Mesh& mesh,
                                           int64_t tokens = 0, const Options& options = {});
template <typename Contained>
std::vector<PlacedExperts> expert_parallel(const torch::nn::ModuleHolder<Contained>& holder,
                                           const comm::Mesh& mesh, int64_t tokens = 0,
                                           const Options& options = {}) {
  return expert_parallel(*holder.ptr(), mesh, tokens, options);
}

}  // namespace zeropage
