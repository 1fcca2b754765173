#include "bench/train_gpt/progress.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <string>
#include <unistd.h>

#include "examples/progress/words.h"

namespace train_gpt {
namespace {

constexpr int64_t kPlainLines = 20;
constexpr auto kPlainSilence = std::chrono::seconds(30);  // no longer than that without a line
constexpr double kSmoothing = 0.1;

}  // namespace

Progress::Progress(const ProgressOptions& options)
    : options_(options), moving_(isatty(STDOUT_FILENO) != 0) {}

void Progress::show(int64_t step, double loss, double seconds) {
  smoothed_seconds_ = step < options_.first_step + 2
                          ? seconds
                          : (1 - kSmoothing) * smoothed_seconds_ + kSmoothing * seconds;
  const bool last = step + 1 == options_.steps;
  const int64_t every = std::max<int64_t>(1, options_.steps / kPlainLines);
  const auto now = std::chrono::steady_clock::now();
  const bool due = step == options_.first_step || last || (step + 1) % every == 0 ||
                   now - last_line_ >= kPlainSilence;
  if (options_.quiet || (!moving_ && !due)) return;
  last_line_ = now;
  const double rate = static_cast<double>(options_.tokens_per_step) / smoothed_seconds_;
  std::array<char, 16> utilisation{};
  if (options_.utilisation_per_token_rate) {
    std::snprintf(utilisation.data(), utilisation.size(), "MFU %.1f %%  ",
                  100 * rate * *options_.utilisation_per_token_rate);
  }
  const double left = smoothed_seconds_ * static_cast<double>(options_.steps - step - 1);
  std::printf("%sstep %*lld/%lld  loss %s  %.0f tokens/s  %s%s left%s", moving_ ? "\r" : "",
              static_cast<int>(std::to_string(options_.steps).size()),
              static_cast<long long>(step + 1), static_cast<long long>(options_.steps),
              examples::fixed(loss, 4).c_str(), rate, utilisation.data(),
              examples::duration(left).c_str(), moving_ && !last ? "\033[K" : "\n");
  std::fflush(stdout);
}

void Progress::tell(int64_t step, const std::string& what) const {
  if (options_.quiet) return;
  std::printf("%sstep %lld %s\n", moving_ ? "\r\033[K" : "", static_cast<long long>(step + 1),
              what.c_str());
  std::fflush(stdout);
}

}  // namespace train_gpt
