// Where a chain of dropped values can be cut: private to checkpointing/.
//
// Where everything is dropped, the first replay brings everything back. What is kept as an anchor
// ends the replays behind it: a boundary after an item keeps all items up to it that are read past
// it, such as the one residual value between two blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "checkpointing/detail/step_graph.h"

namespace zeropage::checkpointing::detail {

// What is dropped or kept as one: the droppable outputs of one operator.
struct Item {
  size_t op = 0;
  int64_t bytes = 0;
  double seconds = 0;  // of its replay alone
  std::vector<size_t> values;
};

// [items], 1: a member.
using ItemSet = std::vector<uint8_t>;

// In the order of their operators.
std::vector<Item> find_items(const StepGraph& graph);

// Different sets of items to keep, the empty one first, then from few boundaries to many: as even as
// narrow boundaries allow, narrower where much is kept before, and every boundary of one item.
std::vector<ItemSet> anchor_sets(const StepGraph& graph, const std::vector<Item>& items);

}  // namespace zeropage::checkpointing::detail
