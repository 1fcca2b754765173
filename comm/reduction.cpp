#include <algorithm>
#include <array>
#include <bit>
#include <type_traits>
#include <vector>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "zeropage/check.h"
#include "zeropage/communicator.h"

namespace zeropage::comm {
namespace {

// One block stays in the first-level cache while the tree over ranks is walked.
constexpr int64_t kBlockNumel = 1024;

template <typename T>
using Accumulator =
    std::conditional_t<std::is_same_v<T, c10::BFloat16> || std::is_same_v<T, c10::Half>, float, T>;

// Where the tree over ranks [low, high) parts, high - low > 1.
template <typename Rank>
Rank middle_of(Rank low, Rank high) {
  return low + static_cast<Rank>(std::bit_floor(static_cast<size_t>(high - low - 1)));
}

// ranks: those of [low, high) that are counted.
void add_maximal_subtrees(std::span<const int> ranks, int low, int high,
                          std::vector<RankRange>& found) {
  if (ranks.empty()) return;
  if (static_cast<int>(ranks.size()) == high - low) {
    found.push_back({low, high});
    return;
  }
  const int middle = middle_of(low, high);
  const auto right = std::lower_bound(ranks.begin(), ranks.end(), middle);
  add_maximal_subtrees({ranks.begin(), right}, low, middle, found);
  add_maximal_subtrees({right, ranks.end()}, middle, high, found);
}

struct Add {
  template <typename A>
  static A apply(A left, A right) {
    return left + right;
  }
};

struct Min {
  // A NaN on any rank is a NaN in the result.
  template <typename A>
  static A apply(A left, A right) {
    return left != left || left < right ? left : right;
  }
};

struct Max {
  // A NaN on any rank is a NaN in the result.
  template <typename A>
  static A apply(A left, A right) {
    return left != left || left > right ? left : right;
  }
};

// What is reduced, by rank. Where ranks [r, ends[r]) of more than one are known together, data[r] has
// their accumulators, and the others of them have nothing.
struct Known {
  std::span<const void* const> data;
  std::span<const int> ends;  // empty: each rank is known by itself

  bool has(size_t low, size_t high) const {
    return !ends.empty() && ends[low] == static_cast<int>(high);
  }
};

template <typename T, typename Combine>
class BlockReducer {
 public:
  using A = Accumulator<T>;

  BlockReducer(const Known& known, int64_t first, int64_t numel)
      : known_(known), first_(first), numel_(numel) {}

  // Reduces ranks [low, high) of the block into `out`.
  void reduce(size_t low, size_t high, A* __restrict out) const {
    if (high - low == 1) {
      const T* __restrict only = block_of<T>(low);
      for (int64_t i = 0; i < numel_; ++i) out[i] = static_cast<A>(only[i]);
    } else if (known_.has(low, high)) {
      std::copy_n(block_of<A>(low), numel_, out);
    } else if (high - low == 2) {
      const T* __restrict left = block_of<T>(low);
      const T* __restrict right = block_of<T>(low + 1);
      for (int64_t i = 0; i < numel_; ++i) {
        out[i] = Combine::apply(static_cast<A>(left[i]), static_cast<A>(right[i]));
      }
    } else {
      const size_t middle = middle_of(low, high);
      std::array<A, kBlockNumel> right;
      reduce(low, middle, out);
      reduce(middle, high, right.data());
      for (int64_t i = 0; i < numel_; ++i) out[i] = Combine::apply(out[i], right[i]);
    }
  }

 private:
  template <typename Element>
  const Element* block_of(size_t rank) const {
    return static_cast<const Element*>(known_.data[rank]) + first_;
  }

  const Known known_;
  const int64_t first_;
  const int64_t numel_;
};

// Calls use(reduced, first, count) with each block's accumulators.
template <typename T, typename Combine, typename Use>
void for_each_block(const Known& known, int64_t numel, Use use) {
  std::array<Accumulator<T>, kBlockNumel> reduced;
  for (int64_t first = 0; first < numel; first += kBlockNumel) {
    const int64_t count = std::min(kBlockNumel, numel - first);
    BlockReducer<T, Combine>(known, first, count).reduce(0, known.data.size(), reduced.data());
    use(reduced.data(), first, count);
  }
}

template <typename T, typename Combine>
void reduce_blocks(const Known& known, T* out, int64_t numel, int64_t divisor) {
  using A = Accumulator<T>;
  for_each_block<T, Combine>(known, numel, [&](const A* reduced, int64_t first, int64_t count) {
    T* block = out + first;
    if (divisor == 1) {
      for (int64_t i = 0; i < count; ++i) block[i] = static_cast<T>(reduced[i]);
    } else {
      const A by = static_cast<A>(divisor);
      for (int64_t i = 0; i < count; ++i) block[i] = static_cast<T>(reduced[i] / by);
    }
  });
}

template <typename T>
void reduce_typed(const Known& known, void* out, int64_t numel, ReduceOp op) {
  auto* typed_out = static_cast<T*>(out);
  if (op == ReduceOp::kMax) {
    reduce_blocks<T, Max>(known, typed_out, numel, /*divisor=*/1);
  } else if (op == ReduceOp::kMin) {
    reduce_blocks<T, Min>(known, typed_out, numel, /*divisor=*/1);
  } else {
    const auto divisor =
        op == ReduceOp::kMean ? static_cast<int64_t>(known.data.size()) : int64_t{1};
    reduce_blocks<T, Add>(known, typed_out, numel, divisor);
  }
}

template <typename T>
void accumulate_typed(const Known& known, void* out, int64_t numel, ReduceOp op) {
  using A = Accumulator<T>;
  const auto store = [out](const A* reduced, int64_t first, int64_t count) {
    std::copy_n(reduced, count, static_cast<A*>(out) + first);
  };
  if (op == ReduceOp::kMax) {
    for_each_block<T, Max>(known, numel, store);
  } else if (op == ReduceOp::kMin) {
    for_each_block<T, Min>(known, numel, store);
  } else {
    for_each_block<T, Add>(known, numel, store);
  }
}

// Calls visit with a value of the C++ type of `dtype`.
template <typename Visit>
void visit_dtype(c10::ScalarType dtype, Visit visit) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return visit(float());
    case c10::ScalarType::Double:
      return visit(double());
    case c10::ScalarType::BFloat16:
      return visit(c10::BFloat16());
    case c10::ScalarType::Half:
      return visit(c10::Half());
    case c10::ScalarType::Long:
      return visit(int64_t());
    case c10::ScalarType::Int:
      return visit(int32_t());
    case c10::ScalarType::Byte:
      return visit(uint8_t());
    default:
      ZP_THROW(
          "reduction: dtype ", dtype,
          " is not reduced over ranks; use float, double, bfloat16, half, int32, int64 or uint8");
  }
}

}  // namespace

c10::ScalarType accumulator_of(c10::ScalarType dtype) {
  const bool is_low = dtype == c10::ScalarType::BFloat16 || dtype == c10::ScalarType::Half;
  return is_low ? c10::ScalarType::Float : dtype;
}

std::vector<RankRange> maximal_subtrees(std::span<const int> ranks, int size) {
  std::vector<RankRange> found;
  add_maximal_subtrees(ranks, 0, size, found);
  return found;
}

void reduce_in_rank_order(std::span<const void* const> contributions, void* out, int64_t numel,
                          c10::ScalarType dtype, ReduceOp op) {
  visit_dtype(dtype, [&]<typename T>(T) {
    reduce_typed<T>({.data = contributions, .ends = {}}, out, numel, op);
  });
}

void reduce_to_accumulators(std::span<const void* const> contributions, void* out, int64_t numel,
                            c10::ScalarType dtype, ReduceOp op) {
  visit_dtype(dtype, [&]<typename T>(T) {
    accumulate_typed<T>({.data = contributions, .ends = {}}, out, numel, op);
  });
}

void combine_in_rank_order(std::span<const Partial> partials, void* out, int64_t numel,
                           c10::ScalarType dtype, ReduceOp op) {
  const auto ranks = static_cast<size_t>(partials.back().ranks.end);
  std::vector<const void*> data(ranks);
  std::vector<int> ends(ranks);
  for (const Partial& partial : partials) {
    data[static_cast<size_t>(partial.ranks.begin)] = partial.data;
    ends[static_cast<size_t>(partial.ranks.begin)] = partial.ranks.end;
  }
  visit_dtype(
      dtype, [&]<typename T>(T) { reduce_typed<T>({.data = data, .ends = ends}, out, numel, op); });
}

}  // namespace zeropage::comm
