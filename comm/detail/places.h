// The order in which ranks in a row, or hosts, turn to each other. Places are [0, size).
#pragma once

#include <bit>

namespace zeropage::comm::detail {

// visit(other) in an order that spreads the load: every place begins with its right neighbour.
template <typename Visit>
void for_each_other(int place, int size, Visit visit) {
  for (int distance = 1; distance < size; ++distance) visit((place + distance) % size);
}

// From whom `place` > 0 receives in the binomial tree from 0.
inline int parent_in_tree(int place) {
  return place - (place & -place);
}

// visit(child) for each child of `place` in the binomial tree over [0, size) from 0.
template <typename Visit>
void for_each_child(int place, int size, Visit visit) {
  const int span = static_cast<int>(std::bit_ceil(static_cast<unsigned>(size)));
  for (int step = (place == 0 ? span : place & -place) / 2; step > 0; step /= 2) {
    if (place + step < size) visit(place + step);
  }
}

// visit(told, teller, distance) for each round of a dissemination: whom `place` tells that it has
// come, and who tells it.
template <typename Visit>
void for_each_round(int place, int size, Visit visit) {
  for (int distance = 1; distance < size; distance *= 2) {
    visit((place + distance) % size, (place - distance + size) % size, distance);
  }
}

}  // namespace zeropage::comm::detail
