// Stretches with smaller states or split values, for every combination of options and format.
#pragma once

#include <functional>
#include <ostream>
#include <variant>
#include <vector>

#include <gtest/gtest.h>

#include "optim/packed_tensors.h"
#include "optim/split_values.h"
#include "tests/optim/step_cases.h"

namespace zeropage::optim::packed_cases {

using namespace zeropage::testing;

inline constexpr int64_t kPackedNumel = 2003;
inline constexpr int64_t kFirstInBlock = 77;

enum class Values : uint8_t { kFp32, kSplit };

struct Format {
  StateFormat states;
  Values values;
};

inline std::ostream& operator<<(std::ostream& out, const Format& format) {
  return out << "format " << static_cast<int>(format.states)
             << (format.values == Values::kSplit ? ", split" : "");
}

inline const std::vector<Format>& all_formats() {
  static const std::vector<Format> all = {{StateFormat::kBf16, Values::kFp32},
                                          {StateFormat::k8Bit, Values::kFp32},
                                          {StateFormat::kFp32, Values::kSplit},
                                          {StateFormat::kBf16, Values::kSplit},
                                          {StateFormat::k8Bit, Values::kSplit}};
  return all;
}

inline Stretch packed_stretch(const AnyOptions& options, const Format& format,
                              int64_t numel = kPackedNumel,
                              int64_t first_in_block = kFirstInBlock) {
  Stretch stretch{
      .values = random_numbers(numel, 1),
      .gradient = random_numbers(numel, 2),
      .place = {
          .seed = 5, .parameter = 3, .first_element = 1000, .first_in_block = first_in_block}};
  std::visit(
      [&](const auto& known) {
        stretch.states = make_states(known, stretch.values, format.states);
        if (format.states == StateFormat::k8Bit) {
          stretch.scales = make_scales(known, stretch.values, first_in_block);
        }
      },
      options);
  if (format.values == Values::kSplit) {
    const SplitValues split = split_values(stretch.values);
    stretch.values = split.high;
    stretch.remainders = split.low;
  }
  return stretch;
}

inline void run_steps(const AnyOptions& options, int64_t steps, Stretch& stretch) {
  for (int64_t number = 1; number <= steps; ++number) {
    stretch.gradient = random_numbers(stretch.values.numel(), static_cast<uint64_t>(10 + number));
    step(options, number, stretch, {.scale = 0.7});
  }
}

inline ::testing::AssertionResult same_packed_bits(const Stretch& expected, const Stretch& actual) {
  const auto all_of = [](const Stretch& stretch) {
    std::vector<torch::Tensor> all = stretch.states;
    all.insert(all.end(), stretch.scales.begin(), stretch.scales.end());
    all.push_back(stretch.values);
    if (stretch.remainders.defined()) all.push_back(stretch.remainders);
    return all;
  };
  const auto of_expected = all_of(expected);
  const auto of_actual = all_of(actual);
  for (size_t i = 0; i < of_expected.size(); ++i) {
    const auto bytes = [](const torch::Tensor& tensor) { return tensor.cpu().view(at::kByte); };
    if (!torch::equal(bytes(of_expected[i]), bytes(of_actual[i]))) {
      return ::testing::AssertionFailure() << "tensor " << i << " differs";
    }
  }
  return ::testing::AssertionSuccess();
}

// The stretch of made(tensor) for each tensor; scales and remainders too.
inline Stretch map_packed(const Stretch& stretch,
                          const std::function<torch::Tensor(const torch::Tensor&)>& made) {
  Stretch mapped = map(stretch, made);
  for (const auto& scales : stretch.scales) mapped.scales.push_back(made(scales));
  if (stretch.remainders.defined()) mapped.remainders = made(stretch.remainders);
  mapped.place = stretch.place;
  return mapped;
}

inline Stretch copy_of_packed(const Stretch& stretch) {
  return map_packed(stretch, [](const torch::Tensor& tensor) { return tensor.clone(); });
}

inline void for_each_case(const std::function<void(const AnyOptions&, const Format&)>& check) {
  for (const StepCase& step_case : all_step_cases()) {
    for (const Format& format : all_formats()) {
      SCOPED_TRACE(::testing::Message() << step_case.name << ", " << format);
      check(step_case.options, format);
    }
  }
}

}  // namespace zeropage::optim::packed_cases
