#include "offload/cuda/flat_norm.h"
#include "offload/cuda/launch.cuh"

namespace zeropage::offload::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr unsigned kAllLanes = 0xffffffffU;

// A warp sums a block. Lane l has elements l, l + 32, ...: loads are coalesced at any alignment,
// and the strides 128, 64 and 32 of the tree are sums of what a lane has. numel: how many elements
// there are from `block` on. Lane 0 returns the sum.
template <typename Element>
__device__ __forceinline__ double sum_of_block(const Element* __restrict__ block, int64_t numel) {
  constexpr int kOfLane = kBlockNumel / kWarp;
  const int lane = threadIdx.x % kWarp;
  Element of_lane[kOfLane];
#pragma unroll
  for (int k = 0; k < kOfLane; ++k) {
    const int i = lane + k * kWarp;
    of_lane[k] = i < numel ? block[i] : Element{};
  }
  double squares[kOfLane];
#pragma unroll
  for (int k = 0; k < kOfLane; ++k) squares[k] = square_of(of_lane[k]);
#pragma unroll
  for (int stride = kOfLane / 2; stride > 0; stride /= 2) {
#pragma unroll
    for (int k = 0; k < stride; ++k) squares[k] = rounded::add(squares[k], squares[k + stride]);
  }
  double sum = squares[0];
#pragma unroll
  for (int stride = kWarp / 2; stride > 0; stride /= 2) {
    sum = rounded::add(sum, __shfl_down_sync(kAllLanes, sum, stride));
  }
  return sum;
}

template <typename Element>
__global__ void __launch_bounds__(kThreads)
    block_sums(const Element* __restrict__ flat, int64_t numel, double* __restrict__ sums) {
  const int64_t blocks = parts_of<int64_t>(numel, kBlockNumel);
  for (int64_t block = blockIdx.x * int64_t{kWarps} + threadIdx.x / kWarp; block < blocks;
       block += gridDim.x * int64_t{kWarps}) {
    const int64_t first = block * kBlockNumel;
    const double sum = sum_of_block(flat + first, numel - first);
    if (threadIdx.x % kWarp == 0) sums[block] = sum;
  }
}

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

// Of a sum to a warp: enough thread blocks to fill the device, few enough that their atomics, a
// handful each, do not count.
constexpr int kBlocksOfWarp = 8;

// Three lanes add to a digit each. Nobody else does: the digits are the warp's.
__device__ __forceinline__ void add_term(Word* digits, double term, const NormPart& part,
                                         Word* flags) {
  const int lane = threadIdx.x % kWarp;
  const uint64_t bits = rounded::bits_of(term);
  if (bits < kInfinityBits) {
    const PlacedMantissa placed = placed_mantissa(bits);
    if (lane < kDigitsOfTerm) digits[placed.digit + lane] += placed.part(lane);
  } else if (lane == 0) {
    ++digits[bits == kInfinityBits ? kInfinitiesWord : kNansWord];
    atomicOr(flags + part.flag / kFlagsPerWord, Word{1} << part.flag % kFlagsPerWord);
  }
  __syncwarp();
}

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
  int64_t at = part_with(parts, range.parts, begin + warp);
  for (int64_t block = begin + warp; block < end; block += kWarps) {
    while (at + 1 < range.parts && parts[at + 1].first_block <= block) ++at;
    const NormPart part = parts[at];
    const int64_t first = (block - part.first_block) * kBlockNumel;
    const double sum = sum_of_block(flat + part.begin + first, part.numel - first);
    add_term(digits[warp], __shfl_sync(kAllLanes, sum, 0), part, flags);
  }
  __syncthreads();
  for (int word = threadIdx.x; word < kExactWords; word += kThreads) {
    Word total = 0;
    for (const auto& of_warp : digits) total += of_warp[word];
    if (total != 0) atomicAdd(words + of_sum * kExactWords + word, total);
  }
}

// The bits that are all set where the number is infinite or NaN; of fp64, in its upper half.
template <typename Element>
constexpr uint32_t kExponent = detail::kInfinity;
template <>
constexpr uint32_t kExponent<double> = 0x7ff00000;
template <>
constexpr uint32_t kExponent<BFloat16Bits> = detail::kInfinity >> 16;
template <>
constexpr uint32_t kExponent<HalfBits> = detail::kHalfInfinity;

template <typename Element>
__device__ __forceinline__ bool is_not_finite(uint32_t bits) {
  return (bits & kExponent<Element>) == kExponent<Element>;
}

__device__ __forceinline__ uint32_t bits_of(double element) {
  return static_cast<uint32_t>(rounded::bits_of(element) >> 32);
}
__device__ __forceinline__ uint32_t bits_of(float element) {
  return rounded::bits_of(element);
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

void block_sums_of_squares(const FlatElements& flat, int64_t numel, double* sums, void* stream) {
  if (numel == 0) return;
  const unsigned blocks = blocks_for(numel, int64_t{kWarps} * kBlockNumel);
  std::visit(
      [&]<typename Element>(const Element* elements) {
        launch({.what = "the launch of the sums of squares", .blocks = blocks, .stream = stream},
               block_sums<Element>, elements, numel, sums);
      },
      flat);
}

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

}  // namespace zeropage::offload::cuda
