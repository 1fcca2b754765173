#include "optim/cpu/fused_step.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <variant>

namespace zeropage::optim::cpu {
namespace {

template <typename Rule, typename Gradient, typename Copy>
ZEROPAGE_ELEMENT void update(const Rule& shared_rule, const FlatStretch& stretch, int64_t begin,
                             int64_t end) {
  // Copies: a store through a float pointer could change what is reached through references.
  const Rule rule = shared_rule;
  const float scale = stretch.gradient_scale;
  float* const values = stretch.values;
  const auto* const gradients = static_cast<const Gradient*>(stretch.gradient);
  auto* const copies = static_cast<Copy*>(stretch.copy_out);
  float* const first = stretch.states[0];
  float* const second = stretch.states[1];
  float* const third = stretch.states[2];
  ZEROPAGE_NO_OVERLAP
  for (int64_t i = begin; i < end; ++i) {
    float states[kMostStates] = {};
    if constexpr (Rule::kStates > 0) states[0] = first[i];
    if constexpr (Rule::kStates > 1) states[1] = second[i];
    if constexpr (Rule::kStates > 2) states[2] = third[i];
    const float gradient = optim::rounded::multiply(to_float(gradients[i]), scale);
    const float value = rule.apply(values[i], gradient, states);
    values[i] = value;
    if constexpr (Rule::kStates > 0) first[i] = states[0];
    if constexpr (Rule::kStates > 1) second[i] = states[1];
    if constexpr (Rule::kStates > 2) third[i] = states[2];
    if constexpr (!std::is_same_v<Copy, NoCopy>) assign(copies[i], value);
  }
}

template <typename Rule, typename Gradient, typename Copy>
void update_on_any_processor(const Rule& rule, const FlatStretch& stretch, int64_t begin,
                             int64_t end) {
  update<Rule, Gradient, Copy>(rule, stretch, begin, end);
}

template <typename Rule, typename Gradient, typename Copy>
ZEROPAGE_AVX2 void update_with_avx2(const Rule& rule, const FlatStretch& stretch, int64_t begin,
                                    int64_t end) {
  update<Rule, Gradient, Copy>(rule, stretch, begin, end);
}

template <typename Rule, typename Gradient, typename Copy>
ZEROPAGE_AVX512 void update_with_avx512(const Rule& rule, const FlatStretch& stretch, int64_t begin,
                                        int64_t end) {
  update<Rule, Gradient, Copy>(rule, stretch, begin, end);
}

template <typename Rule, typename Gradient, typename Copy>
auto update_with(Instructions instructions) {
  switch (instructions) {
    case Instructions::kAvx512:
      return update_with_avx512<Rule, Gradient, Copy>;
    case Instructions::kAvx2:
      return update_with_avx2<Rule, Gradient, Copy>;
    case Instructions::kAnyProcessor:
      break;
  }
  return update_on_any_processor<Rule, Gradient, Copy>;
}

void update(const UpdateRule& rule, const FlatStretch& stretch, int64_t begin, int64_t end,
            Instructions instructions) {
  std::visit(
      [&]<typename Rule>(const Rule& of_class) {
        visit_types(stretch, [&]<typename Gradient, typename Copy>() {
          update_with<Rule, Gradient, Copy>(usable(instructions))(of_class, stretch, begin, end);
        });
      },
      rule);
}

template <typename Copy>
ZEROPAGE_ELEMENT void adopt_elements(const FlatStretch& stretch, int64_t begin, int64_t end) {
  float* const values = stretch.values;
  const auto* const copies = static_cast<const Copy*>(stretch.copy_out);
  ZEROPAGE_NO_OVERLAP
  for (int64_t i = begin; i < end; ++i) values[i] = adopted(values[i], copies[i]);
}

template <typename Copy>
void adopt_on_any_processor(const FlatStretch& stretch, int64_t begin, int64_t end) {
  adopt_elements<Copy>(stretch, begin, end);
}
template <typename Copy>
ZEROPAGE_AVX2 void adopt_with_avx2(const FlatStretch& stretch, int64_t begin, int64_t end) {
  adopt_elements<Copy>(stretch, begin, end);
}
template <typename Copy>
ZEROPAGE_AVX512 void adopt_with_avx512(const FlatStretch& stretch, int64_t begin, int64_t end) {
  adopt_elements<Copy>(stretch, begin, end);
}

template <typename Copy>
void adopt_with(const FlatStretch& stretch, int64_t begin, int64_t end, Instructions instructions) {
  switch (instructions) {
    case Instructions::kAvx512:
      return adopt_with_avx512<Copy>(stretch, begin, end);
    case Instructions::kAvx2:
      return adopt_with_avx2<Copy>(stretch, begin, end);
    case Instructions::kAnyProcessor:
      return adopt_on_any_processor<Copy>(stretch, begin, end);
  }
}

// All bits 0 are +0 in each precision.
void zero_gradient(const FlatStretch& stretch, int64_t begin, int64_t end) {
  visit_precision(stretch.gradient_precision, [&]<typename Gradient>() {
    auto* const gradients = static_cast<Gradient*>(stretch.gradient_to_zero);
    std::memset(gradients + begin, 0, static_cast<size_t>(end - begin) * sizeof(Gradient));
  });
}

// What is zeroed is still in the first-level cache, where it was read, and so is what was adopted
// when it is stepped: 4 KiB of each buffer.
constexpr int64_t kTileNumel = 1024;

}  // namespace

void adopt_copy(const FlatStretch& stretch, int64_t begin, int64_t end, Instructions instructions) {
  if (stretch.copy_precision == Precision::kBFloat16) {
    adopt_with<BFloat16Bits>(stretch, begin, end, usable(instructions));
  } else {
    adopt_with<HalfBits>(stretch, begin, end, usable(instructions));
  }
}

void fused_step(const UpdateRule& rule, const FlatStretch& stretch, int64_t begin, int64_t end,
                Instructions instructions) {
  const bool is_made = stretch.found_inf == nullptr || *stretch.found_inf == 0.0F;
  if (stretch.gradient_to_zero == nullptr && !stretch.adopts_copy) {
    if (is_made) update(rule, stretch, begin, end, instructions);
    return;
  }
  for (int64_t tile = begin; tile < end; tile += kTileNumel) {
    const int64_t tile_end = std::min(tile + kTileNumel, end);
    if (is_made && stretch.adopts_copy) adopt_copy(stretch, tile, tile_end, instructions);
    if (is_made) update(rule, stretch, tile, tile_end, instructions);
    if (stretch.gradient_to_zero != nullptr) zero_gradient(stretch, tile, tile_end);
  }
}

}  // namespace zeropage::optim::cpu
