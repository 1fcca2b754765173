#include "parallel/context/model_ranks.h"

#include <utility>

#include "zeropage/check.h"

namespace zeropage::parallel::context {
namespace {

std::optional<comm::World>& ranks_of_model() {
  thread_local std::optional<comm::World> ranks;
  return ranks;
}

bool has(const comm::World& ranks, int global_rank) {
  for (int rank = 0; rank < ranks.size(); ++rank) {
    if (ranks.global_rank(rank) == global_rank) return true;
  }
  return false;
}

}  // namespace

ModelRanksScope::ModelRanksScope(const comm::World& ranks)
    : before_(std::exchange(ranks_of_model(), ranks)) {}

ModelRanksScope::~ModelRanksScope() {
  ranks_of_model() = before_;
}

void check_among_model_ranks(const comm::World& axis, const char* who) {
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
