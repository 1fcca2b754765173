// The cheapest ways to drop so and so many bytes: private to checkpointing/.
//
// Pareto frontier of the sets of items by bytes and seconds (Nemhauser and Ullmann, "Discrete
// Dynamic Programming and Capital Allocation", 1969); equal items are counted, not listed, and come
// in bundles of 1, 2, 4...
//
// Lifetime: a value. Threads: constant after construction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace zeropage::checkpointing::detail {

// Items that are alike.
struct ItemGroup {
  int64_t bytes = 0;  // of one item
  double seconds = 0;
  size_t count = 0;
};

class SavingsFrontier {
 public:
  // Past `most_states` the frontier is thinned: a requirement is then met with some bytes to spare,
  // about 1/most_states of all.
  SavingsFrontier(const std::vector<ItemGroup>& groups, size_t most_states);

  // From nothing to everything, in bytes and in seconds.
  size_t size() const { return frontier_.size(); }
  int64_t bytes(size_t at) const { return states_[frontier_[at]].bytes; }
  double seconds(size_t at) const { return states_[frontier_[at]].seconds; }
  // The cheapest with at least `bytes`; none where all items have less.
  std::optional<size_t> at_least(int64_t bytes) const;
  // [groups]: how many of each it drops.
  std::vector<size_t> counts(size_t at) const;

 private:
  struct State {
    int64_t bytes = 0;
    double seconds = 0;
    size_t before = 0;  // the state without this bundle; itself: the empty set
    size_t group = 0;
    size_t count = 0;
  };

  void add_bundle(size_t group, size_t count, const ItemGroup& item);
  void thin();

  size_t groups_ = 0;
  size_t most_states_ = 0;
  std::vector<State> states_;     // all that were ever on the frontier
  std::vector<size_t> frontier_;  // bytes ascending, seconds ascending
};

}  // namespace zeropage::checkpointing::detail
