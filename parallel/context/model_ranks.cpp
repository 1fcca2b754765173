#include "parallel/context/model_ranks.h"

#include <utility>

#include "zeropage/check.h"

namespace zeropage::parallel::context {
namespace {

std::optional<comm::World>& ranks_of_model() {
  thread_local std::optional<comm::World> ranks;
  return ranks;
}

std::string& forward() {
  thread_local std::string words;
  return words;
}

int64_t& calls() {
  thread_local int64_t count = 0;
  return count;
}

bool has(const comm::World& ranks, int global_rank) {
  for (int rank = 0; rank < ranks.size(); ++rank) {
    if (ranks.global_rank(rank) == global_rank) return true;
  }
  return false;
}

}  // namespace

ModelRanksScope::ModelRanksScope(const comm::World& ranks, std::string words)
    : ranks_before_(std::exchange(ranks_of_model(), ranks)),
      forward_before_(std::exchange(forward(), std::move(words))) {}

ModelRanksScope::~ModelRanksScope() {
  ranks_of_model() = ranks_before_;
  forward() = forward_before_;
}

const std::string& current_forward() {
  return forward();
}

int64_t attention_calls() {
  return calls();
}

void begin_attention(const comm::World& axis, const char* who) {
  ++calls();
  const std::optional<comm::World>& model = ranks_of_model();
  if (!model) return;
  for (int rank = 0; rank < axis.size(); ++rank) {
    const int global_rank = axis.global_rank(rank);
    ZP_CHECK(has(*model, global_rank), who, ": rank ", global_rank,
             " has other tokens of this rank's samples, but the model averages its gradients over ",
             model->size(), " ranks without it", model->where(),
             "; wrap the model over the mesh that has the axis \"context\"");
  }
}

}  // namespace zeropage::parallel::context
