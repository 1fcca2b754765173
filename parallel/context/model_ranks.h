// The ranks over which the model that runs averages its gradients: a context axis must be among them, or ranks that share samples
// would train models of their own.
#pragma once

#include <optional>

#include "zeropage/world.h"

namespace zeropage::parallel::context {

// While it lives, the calling thread's forwards are of a model of those ranks.
class ModelRanksScope {
 public:
  explicit ModelRanksScope(const comm::World& ranks);
  ~ModelRanksScope();
  ModelRanksScope(const ModelRanksScope&) = delete;
  ModelRanksScope& operator=(const ModelRanksScope&) = delete;

 private:
  const std::optional<comm::World> before_;
};

// Throws where a rank of `axis` is none of the model's. Outside a forward of a wrapped model nothing is known. who: the function.
void check_among_model_ranks(const comm::World& axis, const char* who);

}  // namespace zeropage::parallel::context
