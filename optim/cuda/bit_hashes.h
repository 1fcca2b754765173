// Hashes of many tensors' bits as one CUDA kernel. As optim/cuda/block_hashes.h.
#pragma once

#include <cstdint>

namespace zeropage::optim {

// What a block of threads reads at once.
inline constexpr int64_t kHashedTileBytes = 32 * 1024;

// A tensor's bytes, in the device's memory, at any alignment.
struct HashedPiece {
  const void* data = nullptr;
  int64_t bytes = 0;
  int64_t first_tile = 0;  // of its tiles, among those of all
};

constexpr int64_t hashed_tiles(int64_t bytes) {
  return (bytes + kHashedTileBytes - 1) / kHashedTileBytes;
}

}  // namespace zeropage::optim

namespace zeropage::optim::cuda {

// Adds to hashes[p] that of piece p. pieces, hashes: in the device's memory. tiles: of all pieces.
void bit_hashes(const HashedPiece* pieces, int64_t count, int64_t tiles, uint64_t* hashes,
                void* stream);

}  // namespace zeropage::optim::cuda
