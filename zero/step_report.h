// What became of a step of an accumulator (zero/accumulator.h).
//
// Where nothing in the step depends on the gradients, step() does not wait for the device: what only
// the device knows is read when somebody asks for it, and the host waits then. Such values are Late;
// they convert to what they are of, so `if (report.stepped())` and `double norm = report.norm` are
// written, and come out, as if they had always been there. Who reads the report of the step before,
// when the next one is enqueued, does not wait.
//
// Lifetime: a report keeps what it needs, beyond the accumulator and the model. A value.
// Threads: the training thread. Reading throws c10::Error where the device has failed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <ranges>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace zeropage {

enum class Skipped : uint8_t {
  kNo,
  kNotFinite,  // an infinity or NaN in the gradients of some rank
  kNormSpike,
  kNoWeight,  // no micro-batch of any rank had weight
};

// What only the gradients tell.
struct StepOutcome {
  Skipped skipped = Skipped::kNo;
  double norm = 0;
  double clipped_norm = 0;
  std::vector<std::string> not_finite;
};

// It, when somebody asks. Copies of a report share one.
class LateOutcome {
 public:
  // wait: blocks until it is known; may throw, and is then called again.
  explicit LateOutcome(std::function<StepOutcome()> wait) : wait_(std::move(wait)) {}

  const StepOutcome& get() {
    if (!outcome_) {
      outcome_ = wait_();
      wait_ = nullptr;
    }
    return *outcome_;
  }

 private:
  std::function<StepOutcome()> wait_;
  std::optional<StepOutcome> outcome_;
};

// A value that may still be on its way from a device. Reading it waits.
template <typename T>
class Late {
 public:
  Late(T value = T()) : value_(std::move(value)) {}  // NOLINT(google-explicit-constructor)
  Late(std::shared_ptr<LateOutcome> outcome, T StepOutcome::*member)
      : outcome_(std::move(outcome)), member_(member) {}

  const T& get() const { return outcome_ ? outcome_->get().*member_ : value_; }
  operator const T&() const { return get(); }  // NOLINT(google-explicit-constructor)
  // Of a list, as on it.
  auto begin() const requires std::ranges::range<T> { return get().begin(); }
  auto end() const requires std::ranges::range<T> { return get().end(); }
  auto size() const requires std::ranges::range<T> { return get().size(); }
  bool empty() const requires std::ranges::range<T> { return get().empty(); }
  const auto& operator[](size_t index) const requires std::ranges::range<T> { return get()[index]; }
  friend bool operator==(const Late& left, const T& right) requires std::is_class_v<T> {
    return left.get() == right;
  }

 private:
  T value_{};  // where there is no outcome
  std::shared_ptr<LateOutcome> outcome_;
  T StepOutcome::*member_ = nullptr;
};

struct StepReport {
  Late<Skipped> skipped = Skipped::kNo;
  Late<double> norm = 0;          // of the mean gradient, before clipping
  Late<double> clipped_norm = 0;  // as the optimizer got it; with clip_value as before
  double weight = 0;              // of all micro-batches of all ranks
  double loss_scale = 1;          // of these gradients
  double next_loss_scale = 1;
  bool at_lowest_scale = false;  // an overflow should have lowered the scale, and could not
  Late<std::vector<std::string>> not_finite;  // parameters, in the module's order

  bool stepped() const { return skipped == Skipped::kNo; }
  // "stepped, norm 1.25 clipped to 1", or why not.
  std::string to_string() const;
};

}  // namespace zeropage
