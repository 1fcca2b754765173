#include "comm/reduction.h"

#include <algorithm>
#include <array>
#include <bit>
#include <type_traits>
#include <vector>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "memory/check.h"

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

struct Max {
  // A NaN on any rank is a NaN in the result.
  template <typename A>
  static A apply(A left, A right) {
    return left != left || left > right ? left : right;
  }
};

template <typename T, typename Combine>
class BlockReducer {
 public:
  using A = Accumulator<T>;

  BlockReducer(std::span<const void* const> contributions, int64_t first, int64_t numel)
      : contributions_(contributions), first_(first), numel_(numel) {}

  // Reduces ranks [low, high) of the block into `out`.
  void reduce(size_t low, size_t high, A* __restrict out) const {
    if (high - low == 1) {
      const T* __restrict only = block_of(low);
      for (int64_t i = 0; i < numel_; ++i) out[i] = static_cast<A>(only[i]);
    } else if (high - low == 2) {
      const T* __restrict left = block_of(low);
      const T* __restrict right = block_of(low + 1);
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
  const T* block_of(size_t rank) const {
    return static_cast<const T*>(contributions_[rank]) + first_;
  }

  const std::span<const void* const> contributions_;
  const int64_t first_;
  const int64_t numel_;
};

template <typename T, typename Combine>
void reduce_blocks(std::span<const void* const> contributions, T* out, int64_t numel,
                   int64_t divisor) {
  using A = Accumulator<T>;
  std::array<A, kBlockNumel> reduced;
  for (int64_t first = 0; first < numel; first += kBlockNumel) {
    const int64_t count = std::min(kBlockNumel, numel - first);
    BlockReducer<T, Combine>(contributions, first, count)
        .reduce(0, contributions.size(), reduced.data());
    T* block = out + first;
    if (divisor == 1) {
      for (int64_t i = 0; i < count; ++i) block[i] = static_cast<T>(reduced[i]);
    } else {
      const A by = static_cast<A>(divisor);
      for (int64_t i = 0; i < count; ++i) block[i] = static_cast<T>(reduced[i] / by);
    }
  }
}

template <typename T>
void reduce_typed(std::span<const void* const> contributions, void* out, int64_t numel,
                  ReduceOp op) {
  auto* typed_out = static_cast<T*>(out);
  if (op == ReduceOp::kMax) {
    reduce_blocks<T, Max>(contributions, typed_out, numel, /*divisor=*/1);
  } else {
    const auto divisor =
        op == ReduceOp::kMean ? static_cast<int64_t>(contributions.size()) : int64_t{1};
    reduce_blocks<T, Add>(contributions, typed_out, numel, divisor);
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
  switch (dtype) {
    case c10::ScalarType::Float:
      return reduce_typed<float>(contributions, out, numel, op);
    case c10::ScalarType::Double:
      return reduce_typed<double>(contributions, out, numel, op);
    case c10::ScalarType::BFloat16:
      return reduce_typed<c10::BFloat16>(contributions, out, numel, op);
    case c10::ScalarType::Half:
      return reduce_typed<c10::Half>(contributions, out, numel, op);
    case c10::ScalarType::Long:
      return reduce_typed<int64_t>(contributions, out, numel, op);
    case c10::ScalarType::Int:
      return reduce_typed<int32_t>(contributions, out, numel, op);
    case c10::ScalarType::Byte:
      return reduce_typed<uint8_t>(contributions, out, numel, op);
    default:
      ZP_THROW(
          "reduction: dtype ", dtype,
          " is not reduced over ranks; use float, double, bfloat16, half, int32, int64 or uint8");
  }
}

}  // namespace zeropage::comm
