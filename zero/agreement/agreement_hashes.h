// Hashes by which ranks find out whether something is the same on all of them. They are added to a message that is
// sent for another reason.
//
// The largest of each byte over the ranks, of a hash and of its complement, gives the largest and the smallest
// byte, which are the same if all ranks have the same hash. So this takes no message of its own, and all ranks get
// the same result.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace zeropage::zero {

// A hash of 64 bits of what is added, in order.
class Fingerprint {
 public:
  void add(uint64_t part) {
    // The finalizer of MurmurHash3.
    hash_ = (hash_ ^ part) + 0x9E3779B97F4A7C15ULL;
    hash_ = (hash_ ^ (hash_ >> 33)) * 0xFF51AFD7ED558CCDULL;
    hash_ = (hash_ ^ (hash_ >> 33)) * 0xC4CEB9FE1A85EC53ULL;
    hash_ ^= hash_ >> 33;
  }
  void add(double value) {
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    add(bits);
  }
  void add(std::string_view bytes) {
    add(uint64_t{bytes.size()});
    for (size_t at = 0; at < bytes.size(); at += sizeof(uint64_t)) {
      uint64_t part = 0;
      const std::string_view left = bytes.substr(at, sizeof(part));
      std::memcpy(&part, left.data(), left.size());
      add(part);
    }
  }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0;
};

struct AgreementHashes {
  uint64_t steps = 0;     // made so far: where they differ nothing makes them alike again
  uint64_t settings = 0;  // of the next step: options of optimizers
  uint64_t values = 0;    // of parameters that ranks have each

  friend bool operator==(const AgreementHashes&, const AgreementHashes&) = default;
};

struct AgreementResult {
  bool steps = true;
  bool settings = true;
  bool values = true;

  bool all() const { return steps && settings && values; }
};

// For the message: each number and its complement.
inline constexpr size_t kToldBytes = 2 * sizeof(AgreementHashes);

inline void put(const AgreementHashes& own_hashes, uint8_t* bytes) {
  const std::array<uint64_t, 6> numbers = {own_hashes.steps,    ~own_hashes.steps,
                                           own_hashes.settings, ~own_hashes.settings,
                                           own_hashes.values,   ~own_hashes.values};
  static_assert(sizeof(numbers) == kToldBytes);
  std::memcpy(bytes, numbers.data(), kToldBytes);
}

// bytes: the largest of all ranks.
inline AgreementResult agreement_result(const uint8_t* bytes) {
  std::array<uint64_t, 6> numbers = {};
  std::memcpy(numbers.data(), bytes, kToldBytes);
  return {numbers[0] == ~numbers[1], numbers[2] == ~numbers[3], numbers[4] == ~numbers[5]};
}

}  // namespace zeropage::zero
