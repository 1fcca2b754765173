// Looks for the cheapest set of items that fits a budget when it is dropped: private to
// checkpointing/.
//
// Few items in a short step: every set. Else, for each set of anchors, the knapsack's cheapest set
// whose simulated peak fits: what replays take beside what is dropped is only known from simulation,
// so the bytes asked of the knapsack grow by what is missing. The cheapest ones are improved by
// exchanges. Where none fits, the set with the least peak is looked for without regard to seconds or
// the budget, so that a budget of that peak is accepted.
//
// Lifetime: keeps references to the graph and the simulator. Threads: one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "checkpointing/detail/anchors.h"
#include "checkpointing/detail/replay_simulator.h"
#include "checkpointing/detail/step_graph.h"
#include "checkpointing/recorded_step.h"

namespace zeropage::checkpointing::detail {

class PlanSearch {
 public:
  struct Found {
    Decision dropped;
    Outcome outcome;
    bool fits = false;  // else it is the one with the least peak
  };

  PlanSearch(const StepGraph& graph, ReplaySimulator& simulator, int64_t budget_bytes,
             const PlanOptions& options);

  Found find();

 private:
  struct Candidate {
    ItemSet dropped;
    Outcome outcome;
  };
  // Items that are alike, in the order of forward.
  struct Group {
    int64_t bytes = 0;
    double seconds = 0;
    std::vector<size_t> items;
  };
  enum class End { kEarliest, kLatest };

  void group_items();
  Candidate evaluated(ItemSet dropped);
  bool fits(const Candidate& candidate) const;
  static bool cheaper(const Candidate& one, const Candidate& other);
  bool small_enough_to_enumerate(const PlanOptions& options) const;
  Candidate enumerate();
  std::optional<Candidate> fill(const ItemSet& anchors, double below_seconds);
  ItemSet earliest(const std::vector<size_t>& counts, const ItemSet& anchors) const;
  Candidate least_peak(const std::vector<ItemSet>& anchors);
  void lower_peak(Candidate& best, size_t runs);
  void improve(Candidate& best);
  void keep_costliest(Candidate& best, size_t except_group);
  bool drop_one_more(Candidate& best);
  bool keep_one_more(Candidate& best);
  bool replace(Candidate& best, const Candidate& without, size_t group);
  std::optional<size_t> member(const ItemSet& dropped, size_t group, bool is_dropped,
                               End end) const;
  bool may_run() const { return simulator_.runs() < most_runs_; }

  // Constant after construction.
  const StepGraph& graph_;
  ReplaySimulator& simulator_;
  const int64_t budget_bytes_;
  const std::vector<Item> items_;
  std::vector<Group> groups_;            // in the order of their first items
  std::vector<size_t> by_seconds_;       // groups, the costliest item first
  std::vector<size_t> by_byte_seconds_;  // groups, the cheapest byte first
  bool enumerates_ = false;
  size_t lowering_runs_ = 0;  // of one start of least_peak()

  int64_t kept_peak_bytes_ = 0;  // of keeping everything
  double bound_seconds_ = -1;    // the knapsack's, -1: not known yet
  size_t most_runs_ = 0;
};

}  // namespace zeropage::checkpointing::detail
