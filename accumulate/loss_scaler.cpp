#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <string>

#include "accumulate/detail/archive_values.h"
#include "zeropage/accumulator.h"
#include "zeropage/check.h"

namespace zeropage::accumulate {
namespace {

bool is_power_of_two(double value) {
  int exponent = 0;
  return std::isfinite(value) && std::frexp(value, &exponent) == 0.5;
}

// fp32 has 2^-126 and 2^126 as normal numbers.
bool is_scale(double value) {
  return is_power_of_two(value) && std::abs(std::ilogb(value)) <= 126;
}

// In full, where a stream would write 1.67772e+07.
std::string written(double value) {
  std::array<char, 32> text{};
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr};
}

void check_scale(const char* name, double value) {
  ZP_CHECK(is_scale(value), "LossScaler: ", name,
           ": expected a power of two from 2^-126 to 2^126, got ", written(value),
           "; with any other factor unscaled gradients are rounded");
}

}  // namespace

LossScalerOptions LossScalerOptions::fixed(double scale) {
  return {.initial_scale = scale,
          .growth_factor = 1,
          .backoff_factor = 1,
          .min_scale = scale,
          .max_scale = scale};
}

bool changes(const LossScalerOptions& options) {
  return options.growth_factor != 1 || options.backoff_factor != 1;
}

void check_options(const LossScalerOptions& options) {
  check_scale("initial_scale", options.initial_scale);
  check_scale("min_scale", options.min_scale);
  check_scale("max_scale", options.max_scale);
  check_scale("growth_factor", options.growth_factor);
  check_scale("backoff_factor", options.backoff_factor);
  ZP_CHECK(options.min_scale <= options.initial_scale && options.initial_scale <= options.max_scale,
           "LossScaler: initial_scale: expected one from min_scale ", written(options.min_scale),
           " to max_scale ", written(options.max_scale), ", got ", written(options.initial_scale));
  ZP_CHECK(options.growth_factor >= 1, "LossScaler: growth_factor: expected 1 or more, got ",
           options.growth_factor);
  ZP_CHECK(options.backoff_factor <= 1, "LossScaler: backoff_factor: expected 1 or less, got ",
           options.backoff_factor);
  ZP_CHECK(options.growth_interval >= 1,
           "LossScaler: growth_interval: expected 1 step or more, got ", options.growth_interval,
           "; for a scale that never changes take LossScalerOptions::fixed(scale)");
  ZP_CHECK(options.hysteresis >= 1, "LossScaler: hysteresis: expected 1 overflow or more, got ",
           options.hysteresis);
}

LossScaler::LossScaler(const LossScalerOptions& options) : options_(options) {
  check_options(options);
  state_.scale = options.initial_scale;
}

LossScaler::Verdict LossScaler::update(bool found_inf) {
  return found_inf ? count_overflow() : count_good_step();
}

LossScaler::Verdict LossScaler::count_overflow() {
  const double before = state_.scale;
  const double lower = std::max(before * options_.backoff_factor, options_.min_scale);
  const bool backs_off = state_.overflows + 1 >= options_.hysteresis;
  const bool at_minimum = backs_off && lower == before;
  ZP_CHECK(!at_minimum || options_.at_minimum == AtMinimum::kContinue,
           "LossScaler: gradients overflow at the scale ", written(before),
           ", and it cannot go lower: steps skipped in a row: ", state_.skipped_in_a_row + 1,
           "; look for infinities in the loss, lower the learning rate, compute in bf16 or fp32, "
           "lower min_scale, or go on with AtMinimum::kContinue");
  ++state_.overflows;
  ++state_.skipped_steps;
  ++state_.skipped_in_a_row;
  state_.good_steps = 0;
  if (backs_off) state_.scale = lower;
  return {.skipped = true,
          .scale_before = before,
          .scale_after = state_.scale,
          .at_minimum = at_minimum};
}

LossScaler::Verdict LossScaler::count_good_step() {
  const double before = state_.scale;
  state_.skipped_in_a_row = 0;
  if (++state_.good_steps >= options_.growth_interval) {
    state_.scale = std::min(before * options_.growth_factor, options_.max_scale);
    state_.good_steps = 0;
    state_.overflows = 0;
  }
  return {.skipped = false, .scale_before = before, .scale_after = state_.scale};
}

void LossScaler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("scale", c10::IValue(state_.scale));
  archive.write("good_steps", c10::IValue(state_.good_steps));
  archive.write("overflows", c10::IValue(state_.overflows));
  archive.write("skipped_steps", c10::IValue(state_.skipped_steps));
  archive.write("skipped_in_a_row", c10::IValue(state_.skipped_in_a_row));
}

void LossScaler::load(torch::serialize::InputArchive& archive) {
  const std::string owner = "LossScaler";
  const State loaded = {.scale = detail::read_double(archive, owner, "scale"),
                        .good_steps = detail::read_count(archive, owner, "good_steps"),
                        .overflows = detail::read_count(archive, owner, "overflows"),
                        .skipped_steps = detail::read_count(archive, owner, "skipped_steps"),
                        .skipped_in_a_row = detail::read_count(archive, owner, "skipped_in_a_row")};
  ZP_CHECK(is_scale(loaded.scale) && loaded.scale >= options_.min_scale &&
               loaded.scale <= options_.max_scale,
           "LossScaler: \"scale\" in the archive: expected a power of two from min_scale ",
           written(options_.min_scale), " to max_scale ", written(options_.max_scale), ", got ",
           written(loaded.scale),
           "; load it into a scaler made with the options of the one that was saved");
  ZP_CHECK(loaded.skipped_in_a_row <= loaded.skipped_steps,
           "LossScaler: the archive has more steps skipped in a row (", loaded.skipped_in_a_row,
           ") than skipped steps (", loaded.skipped_steps, "); it is damaged, take another one");
  state_ = loaded;
}

torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                            const LossScaler& scaler) {
  scaler.save(archive);
  return archive;
}

torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                           LossScaler& scaler) {
  scaler.load(archive);
  return archive;
}

}  // namespace zeropage::accumulate
