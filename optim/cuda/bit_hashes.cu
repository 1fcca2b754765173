#include "optim/cuda/bit_hashes.h"
#include "optim/cuda/launch.cuh"
#include "optim/cuda/word_hash.cuh"

namespace zeropage::optim::cuda {
namespace {

constexpr int64_t kWordBytes = sizeof(uint32_t);
constexpr int64_t kTileWords = kHashedTileBytes / kWordBytes;

// The last piece with tiles that begins at the tile or before it.
__device__ __forceinline__ int64_t piece_with(const HashedPiece* __restrict__ pieces, int64_t count,
                                              int64_t tile) {
  int64_t low = 0;
  for (int64_t high = count; high - low > 1;) {
    const int64_t middle = low + (high - low) / 2;
    (pieces[middle].first_tile <= tile ? low : high) = middle;
  }
  return low;
}

// The bytes from `at` on as a word, with zeros behind the last one: the same whatever the alignment is.
__device__ __forceinline__ uint32_t word_of_bytes(const unsigned char* __restrict__ bytes,
                                                  int64_t left) {
  uint32_t word = 0;
  for (int i = 0; i < kWordBytes && i < left; ++i) word |= uint32_t{bytes[i]} << 8 * i;
  return word;
}

// A block of threads takes a tile. A tile's sum does not depend on others, and sums of whole numbers on no order.
__global__ void __launch_bounds__(kThreads)
    hash_pieces(const HashedPiece* __restrict__ pieces, int64_t count, int64_t tiles,
                unsigned long long* __restrict__ hashes) {
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t at = piece_with(pieces, count, tile);
    const HashedPiece piece = pieces[at];
    const auto* const bytes = static_cast<const unsigned char*>(piece.data);
    const int64_t first = (tile - piece.first_tile) * kTileWords;
    const int64_t whole_words = piece.bytes / kWordBytes;
    const bool is_aligned = reinterpret_cast<uintptr_t>(bytes) % kWordBytes == 0;
    uint64_t sum = 0;
    for (int64_t i = first + threadIdx.x; i < first + kTileWords; i += kThreads) {
      const int64_t left = piece.bytes - i * kWordBytes;
      if (left <= 0) break;
      const uint32_t word = is_aligned && i < whole_words
                                ? reinterpret_cast<const uint32_t*>(bytes)[i]
                                : word_of_bytes(bytes + i * kWordBytes, left);
      sum += word * factor_of(i);
    }
    sum = sum_of_lanes(sum);
    if (threadIdx.x % kWarp == 0 && sum != 0) {
      atomicAdd(hashes + at, static_cast<unsigned long long>(sum));
    }
  }
}

}  // namespace

void bit_hashes(const HashedPiece* pieces, int64_t count, int64_t tiles, uint64_t* hashes,
                void* stream) {
  if (tiles == 0) return;
  launch({.what = "the launch of the hashes of tensors",
          .blocks = blocks_for(tiles, 1),
          .stream = stream},
         hash_pieces, pieces, count, tiles, reinterpret_cast<unsigned long long*>(hashes));
}

}  // namespace zeropage::optim::cuda
