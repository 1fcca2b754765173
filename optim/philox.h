// Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): 128 random bits
// for every counter, computed from nothing else, the same on the host and in CUDA kernels. Free of
// torch and of CUDA.
#pragma once

#include <cstdint>

#include "optim/rounded.h"

namespace zeropage::optim {

struct PhiloxCounter {
  uint32_t words[4];
};
struct PhiloxKey {
  uint32_t words[2];
};
struct PhiloxBlock {
  uint32_t words[4];
};

inline constexpr int kPhiloxRounds = 10;
inline constexpr uint32_t kPhiloxFactors[] = {0xd2511f53, 0xcd9e8d57};

// The key of the round after that key's.
ZEROPAGE_ELEMENT PhiloxKey next_key(const PhiloxKey& key) {
  return {{key.words[0] + 0x9e3779b9U, key.words[1] + 0xbb67ae85U}};
}

ZEROPAGE_ELEMENT PhiloxBlock philox(const PhiloxCounter& counter, PhiloxKey key) {
  constexpr uint64_t kFirstFactor = kPhiloxFactors[0];
  constexpr uint64_t kSecondFactor = kPhiloxFactors[1];
  uint32_t a = counter.words[0];
  uint32_t b = counter.words[1];
  uint32_t c = counter.words[2];
  uint32_t d = counter.words[3];
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t first = kFirstFactor * a;
    const uint64_t second = kSecondFactor * c;
    a = static_cast<uint32_t>(second >> 32) ^ b ^ key.words[0];
    b = static_cast<uint32_t>(second);
    c = static_cast<uint32_t>(first >> 32) ^ d ^ key.words[1];
    d = static_cast<uint32_t>(first);
    key = next_key(key);
  }
  return {{a, b, c, d}};
}

}  // namespace zeropage::optim
