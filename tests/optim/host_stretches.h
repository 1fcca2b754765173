// Stretches in host memory at any alignment, for kernels that run there (tests/harness/cuda_on_host):
// their buffers lie between guards, and copies of them lie alike. Without LibTorch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <limits>
#include <optional>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "optim/packed_stretch.h"
#include "optim/update_rule.h"

namespace zeropage::testing {

// Memory of a device that no other buffer shares: elements from `shift` on behind an aligned address.
class GuardedBuffer {
 public:
  GuardedBuffer() = default;
  GuardedBuffer(int64_t numel, int64_t shift, size_t element_bytes)
      : offset_(sizeof(Line) + static_cast<size_t>(shift) * element_bytes),
        bytes_(static_cast<size_t>(numel) * element_bytes),
        lines_((offset_ + bytes_) / sizeof(Line) + 2) {
    std::memset(lines_.data(), 0xa5, lines_.size() * sizeof(Line));
  }

  // Null where there is no buffer.
  template <typename Element>
  Element* as() {
    return lines_.empty() ? nullptr : reinterpret_cast<Element*>(all() + offset_);
  }

  template <typename Element>
  void set(int64_t i, Element element) {
    std::memcpy(all() + offset_ + static_cast<size_t>(i) * sizeof(Element), &element,
                sizeof(Element));
  }

  template <typename Element>
  void fill(const std::function<Element()>& next) {
    for (size_t i = 0; i < bytes_ / sizeof(Element); ++i) set(static_cast<int64_t>(i), next());
  }

  // Guards too. A NaN is a NaN, where the elements are fp32: its bits are the machine's.
  ::testing::AssertionResult is_same(GuardedBuffer& other, bool are_fp32) {
    for (size_t at = 0; at < lines_.size() * sizeof(Line); ++at) {
      if (all()[at] == other.all()[at]) continue;
      const bool is_inside = at >= offset_ && at < offset_ + bytes_;
      if (!is_inside) return ::testing::AssertionFailure() << "byte " << at << " beside it differs";
      const size_t word = (at - offset_) / sizeof(float);
      const bool are_nan = are_fp32 && as<float>()[word] != as<float>()[word] &&
                           other.as<float>()[word] != other.as<float>()[word];
      if (!are_nan) return ::testing::AssertionFailure() << "byte " << at - offset_ << " differs";
    }
    return ::testing::AssertionSuccess();
  }

 private:
  struct alignas(64) Line {
    std::byte at[64];
  };

  std::byte* all() { return reinterpret_cast<std::byte*>(lines_.data()); }

  size_t offset_ = 0;
  size_t bytes_ = 0;
  std::vector<Line> lines_;
};

struct NamedRule {
  std::string name;
  optim::UpdateRule rule;
};

// One of each alternative, with numbers as of a third step.
inline std::vector<NamedRule> all_rules() {
  using namespace optim;
  std::vector<NamedRule> rules;
  const auto add_adam = [&]<typename Rule>(const std::string& name, Rule /*kind*/) {
    rules.push_back({name, Rule{.decay = 0.97F,
                                .beta1 = 0.9F,
                                .beta1_complement = 0.1F,
                                .beta2 = 0.99F,
                                .beta2_complement = 0.01F,
                                .root_factor = 5.8F,
                                .eps = 1e-6F,
                                .step_size = 0.11F}});
  };
  add_adam("AdamW", optim::AdamRule<optim::WeightDecay::kOfValue, false>{});
  add_adam("AdamWAmsgrad", optim::AdamRule<optim::WeightDecay::kOfValue, true>{});
  add_adam("Adam", optim::AdamRule<optim::WeightDecay::kInGradient, false>{});
  add_adam("AdamAmsgrad", optim::AdamRule<optim::WeightDecay::kInGradient, true>{});
  const auto add_sgd = [&]<typename Rule>(const std::string& name, Rule /*kind*/) {
    rules.push_back({name, Rule{.weight_decay = 0.1F,
                                .buffer_rate = 0.9F,
                                .dampening_complement = 0.7F,
                                .momentum = 0.9F,
                                .step_size = 0.1F}});
  };
  add_sgd("Sgd", optim::SgdRule<optim::Momentum::kNone>{});
  add_sgd("SgdMomentum", optim::SgdRule<optim::Momentum::kHeavyBall>{});
  add_sgd("SgdNesterov", optim::SgdRule<optim::Momentum::kNesterov>{});
  rules.push_back(
      {"Adagrad", optim::AdagradRule{.weight_decay = 0.1F, .eps = 1e-10F, .step_size = 0.1F}});
  rules.push_back({"Lion", optim::LionRule{.decay = 0.99F,
                                           .beta1 = 0.9F,
                                           .beta1_complement = 0.1F,
                                           .beta2 = 0.99F,
                                           .beta2_complement = 0.01F,
                                           .step_size = 0.01F}});
  return rules;
}

// What a stretch is, and where it lies.
struct StretchCase {
  int64_t numel = 1000;
  StateFormat format = StateFormat::kFp32;
  bool is_split = false;
  optim::Precision gradient = optim::Precision::kFloat;
  std::optional<optim::Precision> copy = std::nullopt;
  bool adopts_copy = false;  // of whose elements a third was written to
  int64_t first_in_block = 0;
  int64_t first_element = 0;
  int64_t shift = 0;  // elements behind an aligned address, of every buffer
  // Shifts of one buffer, besides.
  int64_t gradient_shift = 0;
  int64_t values_shift = 0;  // or of the upper halves
  int64_t copy_shift = 0;
  int64_t second_state_shift = 0;
  bool zeroes_gradient = false;
  std::optional<float> found_inf = std::nullopt;
};

inline std::ostream& operator<<(std::ostream& out, const StretchCase& it) {
  return out << it.numel << " elements, format " << static_cast<int>(it.format)
             << (it.is_split ? ", split" : "") << ", gradient " << static_cast<int>(it.gradient)
             << ", copy " << (it.copy ? static_cast<int>(*it.copy) : -1) << ", from "
             << it.first_in_block << " of a block and " << it.first_element << ", shifted "
             << it.shift << " + " << it.gradient_shift << ", " << it.values_shift << ", "
             << it.copy_shift << ", " << it.second_state_shift
             << (it.zeroes_gradient ? ", zeroed" : "") << (it.adopts_copy ? ", adopts" : "");
}

inline size_t bytes_of(optim::Precision precision) {
  return precision == optim::Precision::kFloat ? 4 : 2;
}

inline size_t bytes_of(StateFormat format) {
  return static_cast<size_t>(state_bytes(format, 0, 1)) -
         (format == StateFormat::k8Bit ? sizeof(float) : 0);
}

class HostStretch {
 public:
  explicit HostStretch(const StretchCase& of) : of_(of), random_(1) {
    using namespace optim;
    gradient_ = {of.numel, of.shift + of.gradient_shift, bytes_of(of.gradient)};
    fill(gradient_, of.gradient);
    if (of.is_split) {
      high_ = {of.numel, of.shift + of.values_shift, sizeof(uint16_t)};
      low_ = {of.numel, of.shift, sizeof(uint16_t)};
      fill_split();
    } else {
      values_ = {of.numel, of.shift + of.values_shift, sizeof(float)};
      fill(values_, optim::Precision::kFloat);
    }
    if (of.copy) copy_ = {of.numel, of.shift + of.copy_shift, bytes_of(*of.copy)};
    if (of.adopts_copy) fill_copy();
    for (int state = 0; state < optim::kMostStates; ++state) {
      const int64_t besides = state == 1 ? of.second_state_shift : 0;
      states_[state] = {of.numel, of.shift + besides, bytes_of(of.format)};
      fill_state(state);
    }
    if (of.found_inf) found_inf_ = *of.found_inf;
  }

  // Sets fp32 gradients; before a step.
  void set_gradient(int64_t i, float value) { gradient_.set(i, value); }
  void set_scale(int state, int64_t block, float scale) { scales_[state].set(block, scale); }

  optim::PackedStretch packed() {
    optim::PackedStretch stretch{.flat = without_states(), .format = of_.format};
    for (int state = 0; state < optim::kMostStates; ++state) {
      stretch.states[state] = states_[state].as<void>();
      stretch.scales[state] = scales_[state].as<float>();
    }
    stretch.first_in_block = of_.first_in_block;
    stretch.place = {
        .seed = 0x123456789abcdef0, .step = 3, .tensor = 17, .first_element = of_.first_element};
    stretch.high = high_.as<optim::BFloat16Bits>();
    stretch.low = low_.as<uint16_t>();
    return stretch;
  }

  // The stretch with fp32 states and values.
  optim::FlatStretch flat() {
    optim::FlatStretch stretch = without_states();
    for (int state = 0; state < optim::kMostStates; ++state) {
      stretch.states[state] = states_[state].as<float>();
    }
    return stretch;
  }

  ::testing::AssertionResult is_same(HostStretch& other) {
    const bool has_fp32_states = of_.format == StateFormat::kFp32;
    const bool has_fp32_gradient = of_.gradient == optim::Precision::kFloat;
    auto same = gradient_.is_same(other.gradient_, has_fp32_gradient);
    if (!same) return same << " (gradient)";
    same = values_.is_same(other.values_, true);
    if (!same) return same << " (values)";
    same = high_.is_same(other.high_, false);
    if (!same) return same << " (high)";
    same = low_.is_same(other.low_, false);
    if (!same) return same << " (low)";
    same = copy_.is_same(other.copy_, false);
    if (!same) return same << " (copy)";
    for (int state = 0; state < optim::kMostStates; ++state) {
      same = states_[state].is_same(other.states_[state], has_fp32_states);
      if (!same) return same << " (state " << state << ")";
      same = scales_[state].is_same(other.scales_[state], true);
      if (!same) return same << " (scales " << state << ")";
    }
    return same;
  }

 private:
  optim::FlatStretch without_states() {
    optim::FlatStretch stretch{.values = values_.as<float>(),
                               .gradient = gradient_.as<void>(),
                               .gradient_precision = of_.gradient,
                               .copy_out = copy_.as<void>(),
                               .numel = of_.numel,
                               .gradient_scale = 0.7F};
    if (of_.copy) stretch.copy_precision = *of_.copy;
    stretch.adopts_copy = of_.adopts_copy;
    if (of_.zeroes_gradient) stretch.gradient_to_zero = gradient_.as<void>();
    if (of_.found_inf) stretch.found_inf = &found_inf_;
    return stretch;
  }

  float number() { return normal_(random_); }

  template <typename Element>
  Element narrowed(float value) {
    Element element{};
    optim::assign(element, value);
    return element;
  }

  void fill(GuardedBuffer& buffer, optim::Precision precision) {
    using namespace optim;
    if (precision == optim::Precision::kFloat) {
      buffer.fill<float>([&] { return number(); });
    } else if (precision == optim::Precision::kBFloat16) {
      buffer.fill<optim::BFloat16Bits>([&] { return narrowed<optim::BFloat16Bits>(number()); });
    } else {
      buffer.fill<optim::HalfBits>([&] { return narrowed<optim::HalfBits>(number()); });
    }
  }

  void fill_copy() {
    for (int64_t i = 0; i < of_.numel; ++i) {
      const float value = i % 3 == 0 ? number() : values_.as<float>()[i];
      if (*of_.copy == optim::Precision::kBFloat16) {
        copy_.set(i, narrowed<optim::BFloat16Bits>(value));
      } else {
        copy_.set(i, narrowed<optim::HalfBits>(value));
      }
    }
  }

  void fill_split() {
    for (int64_t i = 0; i < of_.numel; ++i) {
      const optim::SplitValue both = optim::split(number());
      high_.set(i, both.high);
      low_.set(i, both.low);
    }
  }

  // Not negative, since some are under a root.
  void fill_state(int state) {
    using namespace optim;
    GuardedBuffer& buffer = states_[state];
    const auto magnitude = [&] { return rounded::float_of(optim::magnitude_of(number())); };
    if (of_.format == StateFormat::kFp32) {
      buffer.fill<float>(magnitude);
    } else if (of_.format == StateFormat::kBf16) {
      buffer.fill<optim::BFloat16Bits>([&] { return narrowed<optim::BFloat16Bits>(magnitude()); });
    } else {
      buffer.fill<uint8_t>([&] { return static_cast<uint8_t>(random_()); });
      scales_[state] = {blocks_of(of_.first_in_block, of_.numel), 0, sizeof(float)};
      scales_[state].fill<float>(magnitude);
    }
  }

  StretchCase of_;
  std::mt19937 random_;
  std::normal_distribution<float> normal_;
  GuardedBuffer gradient_, values_, high_, low_, copy_;
  GuardedBuffer states_[optim::kMostStates];
  GuardedBuffer scales_[optim::kMostStates];
  float found_inf_ = 0;
};

}  // namespace zeropage::testing
