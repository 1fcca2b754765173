#include "zero/pages/value_hash.h"

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include <ATen/ATen.h>

#include "base/exact.h"

namespace zeropage::zero {
namespace {

constexpr uint64_t kOdd = 0x9E3779B97F4A7C15ULL;

uint64_t mixed(uint64_t hash) {
  hash = (hash ^ (hash >> 32)) * 0xD6E8FEB86659FD93ULL;
  return hash ^ (hash >> 32);
}

at::ScalarType whole_numbers_of(int64_t element_bytes) {
  switch (element_bytes) {
    case 8:
      return at::kLong;
    case 4:
      return at::kInt;
    case 2:
      return at::kShort;
    default:
      return at::kByte;
  }
}

std::vector<uint64_t> sums_on_device(const std::vector<at::Tensor>& flat) {
  std::vector<at::Tensor> sums;
  for (const at::Tensor& tensor : flat) {
    sums.push_back(tensor.view(whole_numbers_of(tensor.element_size())).sum(at::kLong));
  }
  const at::Tensor told = at::stack(sums).cpu();
  const auto* const numbers = told.const_data_ptr<int64_t>();
  return {numbers, numbers + told.numel()};
}

}  // namespace

// Four lanes, as a multiplication waits for the one before.
uint64_t hash_of_bytes(const void* bytes, size_t count) {
  constexpr size_t kLanes = 4;
  std::array<uint64_t, kLanes> lanes = {1, 2, 3, 4};
  const auto* const from = static_cast<const char*>(bytes);
  size_t at = 0;
  for (; at + sizeof(lanes) <= count; at += sizeof(lanes)) {
    std::array<uint64_t, kLanes> words;
    std::memcpy(words.data(), from + at, sizeof(words));
    for (size_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = (lanes[lane] ^ words[lane]) * kOdd;
      lanes[lane] ^= lanes[lane] >> 29;
    }
  }
  for (; at < count; at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, from + at, std::min(sizeof(word), count - at));
    lanes[0] = mixed(lanes[0] ^ word) * kOdd;
  }
  uint64_t hash = count;
  for (const uint64_t lane : lanes) hash = mixed(hash ^ lane) * kOdd;
  return hash;
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
  std::array<char, 17> hash;
  std::snprintf(hash.data(), hash.size(), "%016" PRIx64, hashes_of_values({flat}).front());
  if (!flat.is_floating_point()) return c10::str("hash ", hash.data());
  const double norm =
      at::linalg_vector_norm(flat, 2, std::nullopt, /*keepdim=*/false, at::kDouble).item<double>();
  return c10::str("norm ", norm, " (hash ", hash.data(), ")");
}

std::vector<uint64_t> hashes_of_values(const std::vector<at::Tensor>& flat) {
  if (flat.empty()) return {};
  if (!flat.front().is_cpu()) return sums_on_device(flat);
  std::vector<uint64_t> hashes;
  for (const at::Tensor& tensor : flat) {
    hashes.push_back(hash_of_bytes(tensor.const_data_ptr(), tensor.nbytes()));
  }
  return hashes;
}

}  // namespace zeropage::zero
