// The ranks over which the model that runs averages its gradients: a context axis must be among them, or ranks that share samples
// would train models of their own.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "zeropage/world.h"

namespace zeropage::parallel::context {

// While it lives, the calling thread's forwards are of a model of those ranks. forward: which of which model, for messages.
class ModelRanksScope {
 public:
  ModelRanksScope(const comm::World& ranks, std::string forward);
  ~ModelRanksScope();
  ModelRanksScope(const ModelRanksScope&) = delete;
  ModelRanksScope& operator=(const ModelRanksScope&) = delete;

 private:
  const std::optional<comm::World> ranks_before_;
  const std::string forward_before_;
};

// "" outside a forward of a wrapped model.
const std::string& current_forward();
// How often the calling thread has begun attention over a context axis.
int64_t attention_calls();

// Attention over a context axis begins. Throws where a rank of `axis` is none of the model's. Outside a forward of a wrapped model nothing is
// known. who: the function.
void begin_attention(const comm::World& axis, const char* who);

}  // namespace zeropage::parallel::context
