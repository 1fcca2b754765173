#include "state/block_checksums.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <nmmintrin.h>
#include <stdexcept>

namespace zeropage::state {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // reflected: bit 31 is x^0

constexpr std::array<uint32_t, 256> crcs_of_bytes() {
  std::array<uint32_t, 256> crcs{};
  for (uint32_t byte = 0; byte < crcs.size(); ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ ((crc & 1) != 0 ? kPolynomial : 0);
    crcs[byte] = crc;
  }
  return crcs;
}

uint32_t add_by_table(uint32_t crc, const char* data, uint64_t bytes) {
  static constexpr std::array<uint32_t, 256> kCrcs = crcs_of_bytes();
  for (uint64_t i = 0; i < bytes; ++i) {
    crc = crc >> 8 ^ kCrcs[(crc ^ static_cast<uint8_t>(data[i])) & 0xff];
  }
  return crc;
}

__attribute__((target("sse4.2"))) uint32_t add_by_instruction(uint32_t crc, const char* data,
                                                              uint64_t bytes) {
  uint64_t wide = crc;
  for (; bytes >= sizeof(uint64_t); bytes -= sizeof(uint64_t), data += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, data, sizeof(word));
    wide = _mm_crc32_u64(wide, word);
  }
  crc = static_cast<uint32_t>(wide);
  for (; bytes > 0; --bytes, ++data) crc = _mm_crc32_u8(crc, static_cast<uint8_t>(*data));
  return crc;
}

// Polynomials over GF(2), modulo ours, reflected.
uint32_t product(uint32_t a, uint32_t b) {
  uint32_t result = 0;
  for (uint32_t bit = uint32_t{1} << 31; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) result ^= b;
    b = b >> 1 ^ ((b & 1) != 0 ? kPolynomial : 0);  // times x
  }
  return result;
}

uint32_t x_to_the(uint64_t power) {
  uint32_t result = uint32_t{1} << 31;   // 1
  uint32_t squared = uint32_t{1} << 30;  // x
  for (; power != 0; power >>= 1) {
    if ((power & 1) != 0) result = product(result, squared);
    squared = product(squared, squared);
  }
  return result;
}

}  // namespace

uint32_t crc32c(const char* data, uint64_t bytes, uint32_t before) {
  static const bool kHasInstruction = __builtin_cpu_supports("sse4.2") != 0;
  return ~(kHasInstruction ? add_by_instruction(~before, data, bytes)
                           : add_by_table(~before, data, bytes));
}

uint32_t joined_crc32c(uint32_t first, uint32_t second, uint64_t second_bytes) {
  return product(first, x_to_the(second_bytes * 8)) ^ second;
}

void PieceChecksums::add(uint64_t offset, const char* data, uint64_t bytes) {
  while (bytes > 0) {
    const uint64_t here = std::min(bytes, kBlockBytes - offset % kBlockBytes);
    const bool follows = !pieces_.empty() && offset % kBlockBytes != 0 &&
                         pieces_.back().offset + pieces_.back().bytes == offset;
    if (!follows) pieces_.push_back({offset, 0, 0});
    ChecksumPiece& piece = pieces_.back();
    piece.crc = crc32c(data, here, piece.crc);
    piece.bytes += here;
    offset += here;
    data += here;
    bytes -= here;
  }
}

std::vector<uint32_t> join_pieces(const std::string& file, uint64_t file_bytes,
                                  std::vector<ChecksumPiece> pieces) {
  std::sort(pieces.begin(), pieces.end(),
            [](const auto& a, const auto& b) { return a.offset < b.offset; });
  std::vector<uint32_t> blocks(blocks_of_file(file_bytes), 0);
  uint64_t end = 0;
  for (const ChecksumPiece& piece : pieces) {
    if (piece.offset != end) {
      throw std::logic_error(file + ": byte " + std::to_string(std::min(end, piece.offset)) +
                             " was written " + (piece.offset > end ? "by no rank" : "twice"));
    }
    uint32_t& block = blocks.at(piece.offset / kBlockBytes);
    block =
        piece.offset % kBlockBytes == 0 ? piece.crc : joined_crc32c(block, piece.crc, piece.bytes);
    end += piece.bytes;
  }
  if (end != file_bytes) {
    throw std::logic_error(file + ": byte " + std::to_string(end) + " was written by no rank");
  }
  return blocks;
}

}  // namespace zeropage::state
