// Progress for people: one moving line on a terminal, plain lines elsewhere.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace train_gpt {

struct ProgressOptions {
  int64_t steps = 0;
  int64_t first_step = 0;
  int64_t tokens_per_step = 0;  // over all ranks
  // Model FLOPs utilisation at one token a second; none: not shown.
  std::optional<double> utilisation_per_token_rate;
  bool quiet = false;  // print nothing (ranks other than 0)
};

class Progress {
 public:
  explicit Progress(const ProgressOptions& options);

  // How many steps there will be.
  void expect(int64_t steps) { options_.steps = steps; }
  // After step `step` (from 0), which took `seconds`.
  void show(int64_t step, double loss, double seconds);
  // On a line of its own.
  void tell(int64_t step, const std::string& what) const;

 private:
  ProgressOptions options_;
  const bool moving_;
  double smoothed_seconds_ = 0;
  std::chrono::steady_clock::time_point last_line_;
};

}  // namespace train_gpt
