#include "checkpointing/detail/anchors.h"

#include <algorithm>
#include <array>

namespace zeropage::checkpointing::detail {
namespace {

constexpr std::array<int64_t, 18> kSegmentCounts = {2,  3,  4,  5,  6,  8,  10, 12,  16,
                                                    20, 24, 32, 40, 48, 64, 96, 128, 256};
// What a segment and the anchors before it may have together, as a share of all candidates' bytes.
constexpr std::array<double, 10> kSegmentShares = {0.56, 0.4,  0.3, 0.24, 0.2,
                                                   0.16, 0.13, 0.1, 0.07, 0.05};

class Boundaries {
 public:
  Boundaries(const StepGraph& graph, const std::vector<Item>& items)
      : items_(items),
        last_read_(items.size()),
        width_(items.size() + 1),
        count_(items.size() + 1) {
    read_ends(graph);
    through_.push_back(0);
    for (const Item& item : items) through_.push_back(through_.back() + item.bytes);
    for (size_t at = 0; at < items.size(); ++at) {
      if (last_read_[at] <= at) continue;
      width_[at] += items[at].bytes;
      width_[last_read_[at]] -= items[at].bytes;
      ++count_[at];
      --count_[last_read_[at]];
    }
    for (size_t at = 1; at <= items.size(); ++at) {
      width_[at] += width_[at - 1];
      count_[at] += count_[at - 1];
    }
  }

  int64_t all_bytes() const { return through_.back(); }

  ItemSet even(int64_t segments) const {
    ItemSet kept(items_.size(), 0);
    const int64_t segment_bytes = std::max<int64_t>(all_bytes() / segments, 1);
    for (int64_t segment = 1; segment < segments; ++segment) {
      const int64_t target = segment * segment_bytes;
      keep(narrowest(target - segment_bytes / 2, target + segment_bytes / 2, target), kept);
    }
    return kept;
  }

  ItemSet within(int64_t most_bytes) const {
    ItemSet kept(items_.size(), 0);
    int64_t anchor_bytes = 0;
    size_t begin = 0;
    for (size_t at = 0; at < items_.size(); ++at) {
      if (anchor_bytes + through_[at + 1] - through_[begin] <= most_bytes || at == begin) continue;
      size_t cut = begin;
      for (size_t other = begin; other < at; ++other) {
        if (width_[other] <= width_[cut]) cut = other;
      }
      keep(cut, kept);
      anchor_bytes += width_[cut];
      begin = cut + 1;
    }
    return kept;
  }

  ItemSet at_single_items() const {
    ItemSet kept(items_.size(), 0);
    for (size_t at = 0; at < items_.size(); ++at) {
      if (count_[at] == 1) keep(at, kept);
    }
    return kept;
  }

 private:
  // For each item the last item whose replay reads it, perhaps through passing values.
  void read_ends(const StepGraph& graph) {
    const RecordedStep& step = graph.step();
    std::vector<size_t> item_of(step.operators.size(), items_.size());
    for (size_t at = 0; at < items_.size(); ++at) item_of[items_[at].op] = at;
    std::vector<size_t> read_until(step.values.size(), 0);
    for (size_t op = step.operators.size(); op-- > 0;) {
      size_t until = item_of[op] < items_.size() ? item_of[op] : 0;
      for (const size_t output : graph.outputs(op)) {
        if (!graph.saved(output)) until = std::max(until, read_until[output]);
      }
      for (const size_t input : graph.inputs(op)) {
        read_until[input] = std::max(read_until[input], until);
      }
    }
    for (size_t at = 0; at < items_.size(); ++at) {
      for (const size_t value : items_[at].values) {
        last_read_[at] = std::max(last_read_[at], read_until[value]);
      }
    }
  }

  // The boundary with the fewest bytes, then nearest to the target, among those whose bytes up to
  // it are between the two.
  size_t narrowest(int64_t from_bytes, int64_t to_bytes, int64_t target_bytes) const {
    const auto at_or_past = [&](int64_t bytes) {
      const auto found = std::lower_bound(through_.begin() + 1, through_.end(), bytes);
      return std::min(static_cast<size_t>(found - through_.begin()) - 1, items_.size() - 1);
    };
    size_t best = at_or_past(target_bytes);
    for (size_t at = at_or_past(from_bytes); at < items_.size(); ++at) {
      if (through_[at + 1] > to_bytes) break;
      const auto rank = [&](size_t boundary) {
        return std::pair(width_[boundary], std::abs(through_[boundary + 1] - target_bytes));
      };
      if (rank(at) < rank(best)) best = at;
    }
    return best;
  }

  void keep(size_t boundary, ItemSet& kept) const {
    for (size_t at = 0; at <= boundary; ++at) {
      if (last_read_[at] > boundary) kept[at] = 1;
    }
  }

  const std::vector<Item>& items_;
  std::vector<size_t> last_read_;  // [items]: an item
  std::vector<int64_t> width_;     // [items + 1]: bytes of what is read past the boundary
  std::vector<int64_t> count_;     // [items + 1]: of such items
  std::vector<int64_t> through_;   // [items + 1]: bytes of all items before
};

}  // namespace

std::vector<Item> find_items(const StepGraph& graph) {
  std::vector<Item> items;
  for (size_t op = 0; op < graph.step().operators.size(); ++op) {
    Item item;
    item.op = op;
    for (const size_t value : graph.outputs(op)) {
      if (!graph.droppable(value)) continue;
      item.values.push_back(value);
      item.bytes += graph.step().values[value].bytes;
    }
    if (item.values.empty()) continue;
    item.seconds = graph.lone_seconds(op);
    items.push_back(std::move(item));
  }
  return items;
}

std::vector<ItemSet> anchor_sets(const StepGraph& graph, const std::vector<Item>& items) {
  std::vector<ItemSet> sets = {ItemSet(items.size(), 0)};
  if (items.size() < 2) return sets;
  const auto add = [&](ItemSet set) {
    if (std::find(sets.begin(), sets.end(), set) == sets.end()) sets.push_back(std::move(set));
  };
  const Boundaries boundaries(graph, items);
  for (const int64_t segments : kSegmentCounts) {
    if (segments <= static_cast<int64_t>(items.size())) add(boundaries.even(segments));
  }
  for (const double share : kSegmentShares) {
    add(boundaries.within(
        static_cast<int64_t>(share * static_cast<double>(boundaries.all_bytes()))));
  }
  add(boundaries.at_single_items());
  return sets;
}

}  // namespace zeropage::checkpointing::detail
