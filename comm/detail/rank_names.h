// What ranks are called in words: those of a world that was split from another keep their numbers there.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

namespace zeropage::comm::detail {

class RankNames {
 public:
  RankNames() = default;  // every rank is called by its own number
  explicit RankNames(std::vector<int> names) : names_(std::move(names)) {}

  int operator[](int rank) const {
    return names_.empty() ? rank : names_[static_cast<size_t>(rank)];
  }
  std::vector<int> of(std::vector<int> ranks) const {
    for (int& rank : ranks) rank = (*this)[rank];
    return ranks;
  }
  // The rank of that name among `size`; -1: there is none.
  int find(int name, int size) const {
    for (int rank = 0; rank < size; ++rank) {
      if ((*this)[rank] == name) return rank;
    }
    return -1;
  }

 private:
  std::vector<int> names_;  // by rank
};

}  // namespace zeropage::comm::detail
