#include "examples/train_gpt/progress.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <unistd.h>

namespace train_gpt {
namespace {

constexpr int64_t kPlainLines = 20;
constexpr auto kPlainSilence = std::chrono::seconds(30);  // no longer than that without a line
constexpr double kSmoothing = 0.1;

std::string duration(double seconds) {
  const auto whole = static_cast<int64_t>(seconds + 0.5);
  if (whole < 60) return std::to_string(whole) + "s";
  if (whole < 3600) return std::to_string(whole / 60) + "m " + std::to_string(whole % 60) + "s";
  return std::to_string(whole / 3600) + "h " + std::to_string(whole / 60 % 60) + "m";
}

}  // namespace

Progress::Progress(int64_t steps, int64_t tokens_per_step, bool quiet)
    : steps_(steps),
      tokens_per_step_(tokens_per_step),
      quiet_(quiet),
      moving_(isatty(STDOUT_FILENO) != 0) {}

void Progress::show(int64_t step, double loss, double seconds) {
  smoothed_seconds_ =
      step < 2 ? seconds : (1 - kSmoothing) * smoothed_seconds_ + kSmoothing * seconds;
  const bool last = step + 1 == steps_;
  const int64_t every = std::max<int64_t>(1, steps_ / kPlainLines);
  const auto now = std::chrono::steady_clock::now();
  const bool due =
      step == 0 || last || (step + 1) % every == 0 || now - last_line_ >= kPlainSilence;
  if (quiet_ || (!moving_ && !due)) return;
  last_line_ = now;
  const double left = smoothed_seconds_ * static_cast<double>(steps_ - step - 1);
  std::printf("%sstep %*lld/%lld  loss %.4f  %.0f tokens/s  %s left%s", moving_ ? "\r" : "",
              static_cast<int>(std::to_string(steps_).size()), static_cast<long long>(step + 1),
              static_cast<long long>(steps_), loss,
              static_cast<double>(tokens_per_step_) / smoothed_seconds_, duration(left).c_str(),
              moving_ && !last ? "\033[K" : "\n");
  std::fflush(stdout);
}

}  // namespace train_gpt
