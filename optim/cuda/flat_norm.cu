#include "optim/cuda/flat_norm.h"
#include "optim/cuda/launch.cuh"

namespace zeropage::optim::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr unsigned kAllLanes = 0xffffffffU;

// The last of the parts that begins at the block or before it.
__device__ __forceinline__ int64_t part_with(const NormPart* __restrict__ parts, int64_t count,
                                             int64_t block) {
  int64_t low = 0;
  for (int64_t high = count; high - low > 1;) {
    const int64_t middle = low + (high - low) / 2;
    (parts[middle].first_block <= block ? low : high) = middle;
  }
  return low;
}

using Word = unsigned long long;  // that atomics know

// Blocks of a sum that one warp takes: enough thread blocks to fill the device, few enough that their atomics,
// a handful each, do not count.
constexpr int kBlocksOfWarp = 8;

// Three lanes add to a digit each. Nobody else does: the digits are the warp's. All lanes have the same
// term, which is not negative.
__device__ __forceinline__ void add_term(Word* digits, double term) {
  const int lane = threadIdx.x % kWarp;
  const uint64_t bits = optim::rounded::bits_of(term);
  if (bits < kInfinityBits) {
    const PlacedMantissa placed = placed_mantissa(bits);
    if (lane < kDigitsOfTerm) digits[placed.digit + lane] += placed.part(lane);
  } else if (lane == 0) {
    ++digits[bits == kInfinityBits ? kInfinitiesWord : kNansWord];
  }
  __syncwarp();
}

// What a warp adds up. Each lane has two sums in a window, which is kept from block to block as long
// as their numbers fit: then a block costs two reductions over lanes of its keys, and no shuffle.
template <typename Element>
class WarpSquares {
 public:
  // digits: kExactWords in shared memory, of this warp alone.
  __device__ explicit WarpSquares(Word* digits) : digits_(digits) {}

  // Elements [block, block + numel), at most kBlockNumel. Lane l has elements l, l + 32, ...: loads are
  // coalesced at any alignment. Returns whether all squares are finite, to all lanes.
  __device__ __forceinline__ bool add(const Element* __restrict__ block, int64_t numel) {
    const int lane = threadIdx.x % kWarp;
    Element elements[kOfLane];
#pragma unroll
    for (int k = 0; k < kOfLane; ++k) {
      const int i = lane + k * kWarp;
      elements[k] = i < numel ? block[i] : Element{};
    }
    Number numbers[kOfLane];
    uint32_t largest = 0;
    uint32_t least = UINT32_MAX;  // a key less 1, so that zeros come last
#pragma unroll
    for (int k = 0; k < kOfLane; ++k) {
      numbers[k] = widened(elements[k]);
      const uint32_t key = magnitude_key(numbers[k]);
      largest = key > largest ? key : largest;
      least = key - 1 < least ? key - 1 : least;
    }
    largest = __reduce_max_sync(kAllLanes, largest);
    least = __reduce_min_sync(kAllLanes, least);
    if (largest == 0) return true;
    if (largest >= kEndOfWindows<Element>) return add_one_by_one(numbers, UINT32_MAX);
    const bool fits = largest < window_.end_key && least + 1 >= window_.least_key;
    if (!fits || room_ == 0) {
      flush();
      window_ = window_below<Element>(exponent_of_key<Element>(largest));
      high_ = window_.base;
    }
    --room_;
#pragma unroll
    for (int k = 0; k < kOfLane; ++k) {
      const bool is_small = magnitude_key(numbers[k]) < window_.least_key;
      add_square<true>(is_small ? Number{0} : numbers[k], high_, low_);
    }
    if (least + 1 < window_.least_key) add_one_by_one(numbers, window_.least_key);
    return true;
  }

  // Adds what the lanes have to the digits.
  __device__ __forceinline__ void flush() {
    double high = optim::rounded::add(high_, -window_.base);
    double low = low_;
#pragma unroll
    for (int stride = kWarp / 2; stride > 0; stride /= 2) {
      high = optim::rounded::add(high, __shfl_xor_sync(kAllLanes, high, stride));
      low = optim::rounded::add(low, __shfl_xor_sync(kAllLanes, low, stride));
    }
    if (high > 0) {
      const SquareTerms terms = terms_of(high, low, window_.unit);
      add_term(digits_, terms.high);
      add_term(digits_, terms.low);
    }
    high_ = window_.base;
    low_ = 0;
    room_ = kRoom;
  }

 private:
  using Number = decltype(widened(Element{}));
  static constexpr int kOfLane = kBlockNumel / kWarp;
  static constexpr int kRoom = kWindowNumel / kBlockNumel;  // blocks of a window

  // Those of keys below `end`, but for zeros.
  __device__ bool add_one_by_one(const Number* numbers, uint32_t end) {
    bool all_finite = true;
    for (int k = 0; k < kOfLane; ++k) {
      const uint32_t key = magnitude_key(numbers[k]);
      unsigned lanes = __ballot_sync(kAllLanes, key != 0 && key < end);
      for (; lanes != 0; lanes &= lanes - 1) {
        const int lane = __ffs(static_cast<int>(lanes)) - 1;
        const double square = __shfl_sync(kAllLanes, square_of_widened(numbers[k]), lane);
        all_finite &= (optim::rounded::bits_of(square) & INT64_MAX) < kInfinityBits;
        add_term(digits_, optim::rounded::double_of(optim::rounded::bits_of(square) & INT64_MAX));
      }
    }
    return all_finite;
  }

  Word* const digits_;
  SquareWindow window_;
  double high_ = 0;
  double low_ = 0;
  int room_ = 0;
};

// A sum is made by so many thread blocks; each has a share of its blocks, which its warps take in
// turn. Nothing depends on the order: digits are integers.
template <typename Element>
__global__ void __launch_bounds__(kThreads)
    part_sums(const Element* __restrict__ flat, const NormPart* __restrict__ all_parts,
              const NormRange* __restrict__ ranges, unsigned shares, Word* __restrict__ words) {
  __shared__ Word digits[kWarps][kExactWords];
  const int64_t of_sum = blockIdx.x / shares;
  const int64_t share = blockIdx.x % shares;
  const NormRange range = ranges[of_sum];
  const int64_t begin = range.blocks * share / shares;
  const int64_t end = range.blocks * (share + 1) / shares;
  if (begin == end) return;
  for (int i = threadIdx.x; i < kWarps * kExactWords; i += kThreads) {
    digits[i / kExactWords][i % kExactWords] = 0;
  }
  __syncthreads();
  const int warp = threadIdx.x / kWarp;
  const NormPart* const parts = all_parts + range.first_part;
  Word* const flags = words + int64_t{gridDim.x / shares} * kExactWords;
  WarpSquares<Element> squares(digits[warp]);
  int64_t at = part_with(parts, range.parts, begin + warp);
  for (int64_t block = begin + warp; block < end; block += kWarps) {
    while (at + 1 < range.parts && parts[at + 1].first_block <= block) ++at;
    const NormPart part = parts[at];
    const int64_t first = (block - part.first_block) * kBlockNumel;
    const bool all_finite = squares.add(flat + part.begin + first, part.numel - first);
    if (!all_finite && threadIdx.x % kWarp == 0) {
      atomicOr(flags + part.flag / kFlagsPerWord, Word{1} << part.flag % kFlagsPerWord);
    }
  }
  squares.flush();
  __syncthreads();
  // Digits are carried by one place, so that many calls may add to the words.
  for (int word = threadIdx.x; word < kExactWords; word += kThreads) {
    Word total = 0;
    Word below = 0;
    for (const auto& of_warp : digits) {
      total += of_warp[word];
      if (word > 0) below += of_warp[word - 1];
    }
    const Word mine = word + 1 < kExactDigits ? total & kDigitMask : total;
    const Word carried = word < kExactDigits ? below >> kDigitBits : 0;
    if (mine + carried != 0) atomicAdd(words + of_sum * kExactWords + word, mine + carried);
  }
}

// The bits that are all set where the number is infinite or NaN; of fp64, in its upper half.
template <typename Element>
constexpr uint32_t kExponent = optim::detail::kInfinity;
template <>
constexpr uint32_t kExponent<double> = 0x7ff00000;
template <>
constexpr uint32_t kExponent<BFloat16Bits> = optim::detail::kInfinity >> 16;
template <>
constexpr uint32_t kExponent<HalfBits> = optim::detail::kHalfInfinity;

template <typename Element>
__device__ __forceinline__ bool is_not_finite(uint32_t bits) {
  return (bits & kExponent<Element>) == kExponent<Element>;
}

__device__ __forceinline__ uint32_t bits_of(double element) {
  return static_cast<uint32_t>(optim::rounded::bits_of(element) >> 32);
}
__device__ __forceinline__ uint32_t bits_of(float element) {
  return optim::rounded::bits_of(element);
}
template <typename Bits>
__device__ __forceinline__ uint32_t bits_of(Bits element) {
  return element.bits;
}

template <typename Element>
__device__ __forceinline__ bool any_not_finite(const uint4& loaded) {
  const bool upper = is_not_finite<Element>(loaded.y) || is_not_finite<Element>(loaded.w);
  if constexpr (sizeof(Element) == 8) return upper;
  const bool all = upper || is_not_finite<Element>(loaded.x) || is_not_finite<Element>(loaded.z);
  if constexpr (sizeof(Element) == 4) return all;
  return all || is_not_finite<Element>(loaded.x >> 16) || is_not_finite<Element>(loaded.y >> 16) ||
         is_not_finite<Element>(loaded.z >> 16) || is_not_finite<Element>(loaded.w >> 16);
}

// Elements [head, head + 16-byte words) are read as words; the others one by one.
template <typename Element>
__global__ void __launch_bounds__(kThreads)
    look(const Element* __restrict__ flat, int64_t numel, int64_t head, int64_t words,
         float* __restrict__ found) {
  constexpr int kOfWord = sizeof(uint4) / sizeof(Element);
  const int64_t thread = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const int64_t threads = gridDim.x * int64_t{kThreads};
  const auto* const aligned = reinterpret_cast<const uint4*>(flat + head);
  bool any = false;
#pragma unroll 4
  for (int64_t word = thread; word < words; word += threads) {
    any |= any_not_finite<Element>(aligned[word]);
  }
  for (int64_t single = thread; single < numel - words * kOfWord; single += threads) {
    const int64_t i = single < head ? single : single + words * kOfWord;
    any |= is_not_finite<Element>(bits_of(flat[i]));
  }
  if (any) *found = 1.0F;  // whichever thread writes, it writes the same
}

}  // namespace

void add_norm_parts(const FlatElements& flat, const NormPart* parts, const NormRange* ranges,
                    int64_t most_blocks, const NormWords& words, void* stream) {
  if (most_blocks == 0) return;
  const unsigned shares = blocks_for(most_blocks, kWarps * kBlocksOfWarp);
  std::visit(
      [&]<typename Element>(const Element* elements) {
        launch({.what = "the launch of the sums of squares by parameters",
                .blocks = shares * static_cast<unsigned>(words.sums),
                .stream = stream},
               part_sums<Element>, elements, parts, ranges, shares,
               reinterpret_cast<Word*>(words.first));
      },
      flat);
}

void look_for_not_finite(const FlatElements& flat, int64_t numel, float* found, void* stream) {
  if (numel == 0) return;
  std::visit(
      [&]<typename Element>(const Element* elements) {
        constexpr int64_t kOfWord = sizeof(uint4) / sizeof(Element);
        const auto offset = reinterpret_cast<uintptr_t>(elements) % sizeof(uint4) / sizeof(Element);
        const int64_t head =
            std::min<int64_t>((kOfWord - static_cast<int64_t>(offset)) % kOfWord, numel);
        const int64_t words = (numel - head) / kOfWord;
        const unsigned blocks = blocks_for(parts_of(numel, kOfWord), kThreads * 4);
        launch(
            {.what = "the launch of the look for infinities", .blocks = blocks, .stream = stream},
            look<Element>, elements, numel, head, words, found);
      },
      flat);
}

}  // namespace zeropage::optim::cuda
