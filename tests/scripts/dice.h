// Random choices that a seed makes.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <random>

namespace zeropage::scripts {

// Standard distributions differ between libraries; these draw the same everywhere.
class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}
  int below(int bound) { return static_cast<int>(engine_() % static_cast<uint64_t>(bound)); }
  bool one_in(int count) { return below(count) == 0; }
  double between(double low, double high) { return low + (high - low) * below(1001) / 1000.0; }
  template <typename T>
  T any_of(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<int>(values.size()))];
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace zeropage::scripts
