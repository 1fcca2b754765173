// Progress for people: one moving line on a terminal, plain lines elsewhere.
#pragma once

#include <chrono>
#include <cstdint>

namespace train_gpt {

class Progress {
 public:
  // tokens_per_step: over all ranks. quiet: print nothing (ranks other than 0).
  Progress(int64_t steps, int64_t tokens_per_step, bool quiet);

  // After step `step` (from 0), which took `seconds`.
  void show(int64_t step, double loss, double seconds);

 private:
  const int64_t steps_;
  const int64_t tokens_per_step_;
  const bool quiet_;
  const bool moving_;
  double smoothed_seconds_ = 0;
  std::chrono::steady_clock::time_point last_line_;
};

}  // namespace train_gpt
