// CRC-32C of a file's blocks of 1 MiB, from pieces that several ranks write: the checksum of a block
// follows from those of its pieces, so nothing is read again.
//
// CRC-32C (RFC 3720, section 12.1, Castagnoli's polynomial) finds every flip of up to 3 bits in a
// block, and every burst of up to 32. The instruction of SSE 4.2 where the processor has it: some
// 8 GB/s a core.
//
// Free of torch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace zeropage::state {

inline constexpr uint64_t kBlockBytes = 1 << 20;

// Blocks of a file of that size; the last may be shorter.
constexpr uint64_t blocks_of_file(uint64_t file_bytes) {
  return (file_bytes + kBlockBytes - 1) / kBlockBytes;
}

uint32_t crc32c(const char* data, uint64_t bytes, uint32_t before = 0);
// The checksum of two successive stretches, from those of the first and of the second.
uint32_t joined_crc32c(uint32_t first, uint32_t second, uint64_t second_bytes);

// Bytes [offset, offset + bytes) of a file, within one block.
struct ChecksumPiece {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint32_t crc = 0;

  bool operator==(const ChecksumPiece&) const = default;
};

class PieceChecksums {
 public:
  // What is written at `offset`. Pieces that follow each other become one, block by block.
  void add(uint64_t offset, const char* data, uint64_t bytes);
  const std::vector<ChecksumPiece>& pieces() const { return pieces_; }

 private:
  std::vector<ChecksumPiece> pieces_;
};

// The checksum of each block of the file, from pieces in any order. Throws std::logic_error, with the name, unless
// they cover each byte once.
std::vector<uint32_t> join_pieces(const std::string& file, uint64_t file_bytes,
                                  std::vector<ChecksumPiece> pieces);

}  // namespace zeropage::state
