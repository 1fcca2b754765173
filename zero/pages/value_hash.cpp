#include "zero/pages/value_hash.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "base/block_checksum.h"
#include "base/exact.h"
#include "optim/bit_hashes.h"

namespace zeropage::zero {
namespace {

constexpr uint64_t kOdd = 0x9E3779B97F4A7C15ULL;

uint64_t mixed(uint64_t hash) {
  hash = (hash ^ (hash >> 32)) * 0xD6E8FEB86659FD93ULL;
  return hash ^ (hash >> 32);
}

}  // namespace

uint64_t hash_of_bytes(const void* bytes, size_t count) {
  return base::block_checksum(static_cast<const std::byte*>(bytes), static_cast<int64_t>(count));
}

uint64_t sampled_hash(const void* bytes, size_t count, uint64_t round) {
  constexpr size_t kLineBytes = 64, kApart = 64;
  const auto* const from = static_cast<const char*>(bytes);
  const size_t lines = base::div_ceil(count, kLineBytes);
  const size_t apart = std::min(lines, kApart);
  uint64_t hash = count;
  for (size_t line = apart == 0 ? 0 : round % apart; line < lines; line += apart) {
    const size_t begin = line * kLineBytes;
    hash = mixed(hash ^ hash_of_bytes(from + begin, std::min(kLineBytes, count - begin))) * kOdd;
  }
  return hash;
}

std::string words_of_values(const at::Tensor& flat) {
  const std::string hash = base::to_hex(optim::bit_hashes({flat}).front());
  if (!flat.is_floating_point()) return c10::str("hash ", hash);
  const double norm =
      at::linalg_vector_norm(flat, 2, std::nullopt, /*keepdim=*/false, at::kDouble).item<double>();
  return c10::str("norm ", norm, " (hash ", hash, ")");
}

}  // namespace zeropage::zero
