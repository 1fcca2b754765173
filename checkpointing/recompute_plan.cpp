#include "checkpointing/recompute_plan.h"

#include "checkpointing/detail/plan_search.h"
#include "checkpointing/detail/replay_simulator.h"
#include "checkpointing/detail/step_graph.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"

namespace zeropage::checkpointing {
namespace {

Forecast forecast_of(detail::ReplaySimulator& simulator, const detail::Decision& dropped) {
  const detail::Outcome outcome = simulator.run(dropped);
  return {.peak_bytes = outcome.peak_bytes,
          .peak_tick = outcome.peak_tick,
          .replay_seconds = outcome.replay_seconds,
          .replays = simulator.replays()};
}

}  // namespace

std::vector<bool> droppable_values(const RecordedStep& step) {
  const detail::StepGraph graph(step);
  std::vector<bool> droppable(step.values.size());
  for (size_t value = 0; value < droppable.size(); ++value) {
    droppable[value] = graph.droppable(value);
  }
  return droppable;
}

Forecast simulate(const RecordedStep& step, const std::vector<bool>& dropped) {
  const detail::StepGraph graph(step);
  detail::ReplaySimulator simulator(graph);
  ZP_CHECK(dropped.size() == step.values.size(), "simulate: expected one decision for each of ",
           step.values.size(), " values, got ", dropped.size(), "; give [values]");
  for (size_t value = 0; value < dropped.size(); ++value) {
    ZP_CHECK(!dropped[value] || graph.droppable(value), "simulate: value ", value,
             ": expected it to be kept, got it dropped, but it is a leaf, held, not saved, or its "
             "operator cannot be replayed; ask droppable_values()");
  }
  return forecast_of(simulator, {dropped.begin(), dropped.end()});
}

RecomputePlan plan_recompute(const RecordedStep& step, int64_t budget_bytes,
                             const PlanOptions& options) {
  const detail::StepGraph graph(step);
  detail::ReplaySimulator simulator(graph);
  const auto found = detail::PlanSearch(graph, simulator, budget_bytes, options).find();
  const size_t simulations = simulator.runs();
  if (!found.fits) {
    const int64_t kept_bytes = simulator.run(detail::Decision(step.values.size(), 0)).peak_bytes;
    const int64_t least_bytes = found.outcome.peak_bytes;
    ZP_THROW("recompute plan: budget ", memory::format_bytes(budget_bytes), " (", budget_bytes,
             " bytes) of activations: expected at least ", memory::format_bytes(least_bytes), " (",
             least_bytes,
             " bytes), the least peak that recompute reaches; keeping everything takes ",
             memory::format_bytes(kept_bytes),
             "; raise the budget to that least peak, use a smaller micro-batch, or offload");
  }
  return {.dropped = {found.dropped.begin(), found.dropped.end()},
          .forecast = forecast_of(simulator, found.dropped),
          .simulations = simulations};
}

}  // namespace zeropage::checkpointing
