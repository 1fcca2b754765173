// Random numbers that belong to something: to a seed, an epoch and a sample, and to nothing else. They are the same whoever
// draws them, so ranks, loader threads and a resumed run do not change them, and any language can repeat them.
//
//   SampleRandom random(seed, epoch, sample);
//   const bool flip = random.coin(0.5);
//
// Threads: a value; each thread has its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace zeropage::data {

// Numbers that look random, from numbers that do not (Steele et al. 2014).
constexpr uint64_t splitmix64(uint64_t x) {
  uint64_t z = x + 0x9E3779B97F4A7C15ULL;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

// What is drawn for one sample in one epoch: draw k is
// splitmix64(splitmix64(splitmix64(splitmix64(seed) + epoch) + sample) + k).
class SampleRandom {
 public:
  SampleRandom(uint64_t seed, int64_t epoch, int64_t sample)
      : stream_(splitmix64(splitmix64(splitmix64(seed) + static_cast<uint64_t>(epoch)) +
                           static_cast<uint64_t>(sample))) {}

  // Another stream of the same sample, such as that of a transform by its place.
  SampleRandom of(uint64_t stream) const {
    return SampleRandom(splitmix64(stream_ ^ splitmix64(stream)));
  }

  uint64_t next() { return splitmix64(stream_ + draws_++); }
  // In [0, 1), with the 53 bits of a double.
  double uniform() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }
  double uniform(double low, double high) { return low + (high - low) * uniform(); }
  // In [0, count); count is at least 1. The bias is below count / 2^64.
  int64_t below(int64_t count) {
    return static_cast<int64_t>(next() % static_cast<uint64_t>(count));
  }
  bool coin(double probability) { return uniform() < probability; }

 private:
  explicit SampleRandom(uint64_t stream) : stream_(stream) {}

  uint64_t stream_;
  uint64_t draws_ = 0;
};

// 0 to count - 1, shuffled (Fisher and Yates, from the last place on). 8 bytes an element.
inline std::vector<int64_t> permutation(int64_t count, uint64_t seed, int64_t epoch = 0) {
  std::vector<int64_t> order(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) order[static_cast<size_t>(i)] = i;
  // No sample has this number, so what is drawn for samples is independent of their order.
  SampleRandom random(seed, epoch, /*sample=*/-1);
  for (int64_t i = count - 1; i > 0; --i) {
    std::swap(order[static_cast<size_t>(i)], order[static_cast<size_t>(random.below(i + 1))]);
  }
  return order;
}

}  // namespace zeropage::data
