#include "fused/experts/router_notes.h"

#include <utility>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>

#include "zeropage/check.h"

namespace zeropage::fused {
namespace {

// A layer may run several times before a backward; a script that never takes the losses runs more often.
constexpr int kMostUntaken = 32;

}  // namespace

RouterNotes::Untaken& RouterNotes::untaken() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task < 0) return of_forwards_;
  if (of_repetitions_.task != task) {
    of_repetitions_ = {};
    of_repetitions_.task = task;
  }
  return of_repetitions_;
}

void RouterNotes::add(const Routing& routing, const at::Tensor& loss,
                      const parallel::ExpertsOptions& options) {
  Untaken& here = untaken();
  const bool is_repetition = here.task >= 0;
  const auto kept = [&](const at::Tensor& value) {
    return is_repetition ? value.detach().requires_grad_(value.requires_grad()) : value;
  };
  // Without values, as before a DeferredModule has them, no expert is chosen.
  if (!is_repetition && !routing.load.is_meta())
    load_ = load_.defined() ? load_.to(routing.load.device()) + routing.load : routing.load;
  if (!loss.defined() && !options.keep_router_sums) return;
  ZP_CHECK(
      is_repetition || here.forwards < kMostUntaken, "parallel::Experts: ", here.forwards,
      " forwards have added losses of balance that nobody has taken; add auxiliary_loss() to the "
      "loss before each backward, or set ExpertsOptions::balance_loss to 0 (or take router_sums(), "
      "and leave keep_router_sums unset)");
  ++here.forwards;
  if (loss.defined()) here.loss = here.loss.defined() ? here.loss + kept(loss) : kept(loss);
  if (!options.keep_router_sums) return;
  const at::Tensor& probabilities = routing.probabilities;
  parallel::RouterSums sums{routing.load.to(probabilities.scalar_type()),
                            kept(probabilities.sum(0)), probabilities.size(0)};
  if (here.sums) {
    sums = {here.sums->chosen + sums.chosen, here.sums->probabilities + sums.probabilities,
            here.sums->tokens + sums.tokens};
  }
  here.sums = sums;
}

at::Tensor RouterNotes::take_loss() {
  Untaken& here = untaken();
  here.forwards = 0;
  return std::exchange(here.loss, at::Tensor());
}

std::optional<parallel::RouterSums> RouterNotes::take_sums() {
  Untaken& here = untaken();
  here.forwards = 0;
  return std::exchange(here.sums, std::nullopt);
}

}  // namespace zeropage::fused
