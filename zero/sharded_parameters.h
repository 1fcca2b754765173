// A rank's pages and their gradients, shared by a wrapped module and its optimizers.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/world.h"
#include "zero/gradient_reducer.h"
#include "zero/module_parameters.h"
#include "zero/options.h"
#include "zero/parameter_pages.h"

namespace zeropage {

struct ShardedParameters {
  std::shared_ptr<ParameterPages> pages;
  std::shared_ptr<GradientReducer> reducer;
};

// Of a wrapped module: gradients are averaged in backward. more: lines "field: value" that ranks
// must agree on too. Collective; every rank takes rank 0's values.
ShardedParameters shard_module_parameters(std::vector<NamedParameter> parameters,
                                          const comm::World& world, const Options& options,
                                          const std::vector<std::string>& more);

// Of parameters that nothing wraps: gradients are averaged in step(). Throws for stages that shard
// gradients or parameters. Collective; every rank takes rank 0's values.
ShardedParameters shard_bare_parameters(const std::vector<at::Tensor>& tensors,
                                        const comm::World& world, const Options& options);

}  // namespace zeropage
