// How a stretch with 8-bit states is stepped three blocks at a time, for sets of instructions that have many registers;
// behind quantised_loops_text.h. Free of torch.
//
// A division and a root hold one of the processor's pipes for almost as long as all else of an element takes the
// others. So in a turn, which goes group by group, one block is updated, the next one's codes become numbers, and the
// numbers of the one before become codes. None of the three waits for another.
//
// Groups has, besides:
//
//   using Lanes;  // the largest magnitudes of values, place by place
//   static Lanes fold(Lanes, const float* values);  // with a group more
//   static uint32_t largest(Lanes);
#pragma once

namespace zeropage::optim::cpu {
namespace {

// How far ahead a turn asks for what it reads, a line for each group: two blocks. Farther, it would more often ask in a page of
// memory that the processor has not looked up yet.
constexpr int64_t kAheadNumel = 2 * kStateBlockNumel;

// What a turn does to one state. By value: a store of codes could change what is reached through a pointer.
struct TurnOfState {
  const uint8_t* next_codes = nullptr;
  float next_scale = 0;
  float* next_values = nullptr;
  float* values = nullptr;
  const float* values_before = nullptr;
  float inverse_before = 0;
  uint8_t* codes_before = nullptr;
};

template <typename Rule, int kState = 0>
ZEROPAGE_SET_ELEMENT void load_group(const TurnOfState* states, int64_t first) {
  if constexpr (kState < Rule::kStates) {
    const TurnOfState& state = states[kState];
    Groups::dequantise<sign_of<Rule>(kState)>(state.next_codes + first, state.next_scale,
                                              state.next_values + first);
    load_group<Rule, kState + 1>(states, first);
  }
}

template <typename Rule, int kState = 0>
ZEROPAGE_SET_ELEMENT void store_group(const TurnOfState* states, int64_t first) {
  if constexpr (kState < Rule::kStates) {
    const TurnOfState& state = states[kState];
    Groups::quantise<sign_of<Rule>(kState)>(state.values_before + first, state.inverse_before,
                                            state.codes_before + first);
    store_group<Rule, kState + 1>(states, first);
  }
}

template <typename Rule, typename Gradient>
ZEROPAGE_SET_ELEMENT void update_group(const Rule& rule, float* values, const Gradient* gradients,
                                       float gradient_scale, const TurnOfState* states,
                                       int64_t begin) {
  float* const first = states[0].values + begin;
  float* const second = states[1].values + begin;
  float* const third = states[2].values + begin;
  ZEROPAGE_NO_OVERLAP
  for (int i = 0; i < Groups::kNumel; ++i) {
    float of_element[kMostStates] = {};
    if constexpr (Rule::kStates > 0) of_element[0] = first[i];
    if constexpr (Rule::kStates > 1) of_element[1] = second[i];
    if constexpr (Rule::kStates > 2) of_element[2] = third[i];
    const float gradient = optim::rounded::multiply(to_float(gradients[i]), gradient_scale);
    values[i] = rule.apply(values[i], gradient, of_element);
    if constexpr (Rule::kStates > 0) first[i] = of_element[0];
    if constexpr (Rule::kStates > 1) second[i] = of_element[1];
    if constexpr (Rule::kStates > 2) third[i] = of_element[2];
  }
}

// A block, and its states.
struct TurnedBlock {
  PartOfBlock part;
  BlockInFp32* in_fp32 = nullptr;
};

// The scales of what was updated. Returns whether a turn takes it: whether codes are numbers in units of them.
template <typename Rule>
ZEROPAGE_SET_ELEMENT bool make_scales(const BlockInFp32& of, BlockScale* scales) {
  bool all_have_inverses = true;
  for (int state = 0; state < Rule::kStates; ++state) {
    scales[state] = block_scale(of.largest[state]);
    all_have_inverses &= scales[state].inverse != 0;
  }
  return all_have_inverses;
}

// REQUIRES: three whole blocks, and scales that a turn takes.
template <typename Rule, typename Gradient>
ZEROPAGE_SET_ELEMENT void turn(const Rule& rule, const QuantisedStretch& all,
                               const TurnedBlock& before, const BlockScale* scales_before,
                               const TurnedBlock& now, const TurnedBlock& next) {
  const auto* const gradients = static_cast<const Gradient*>(all.gradient) + now.part.first;
  float* const values = all.values + now.part.first;
  const float gradient_scale = all.gradient_scale;
  typename Groups::Lanes lanes[kMostStates] = {};
  TurnOfState states[kMostStates];
  for (int state = 0; state < Rule::kStates; ++state) {
    states[state] = {.next_codes = all.codes[state] + next.part.first,
                     .next_scale = all.scales[state][next.part.block],
                     .next_values = next.in_fp32->states[state],
                     .values = now.in_fp32->states[state],
                     .values_before = before.in_fp32->states[state],
                     .inverse_before = scales_before[state].inverse,
                     .codes_before = all.codes[state] + before.part.first};
  }
  for (int64_t i = 0; i < kStateBlockNumel; i += Groups::kNumel) {
    load_group<Rule>(states, i);
    update_group(rule, values + i, gradients + i, gradient_scale, states, i);
    store_group<Rule>(states, i);
    __builtin_prefetch(values + kAheadNumel + i);
    __builtin_prefetch(gradients + kAheadNumel + i);
    for (int state = 0; state < Rule::kStates; ++state) {
      lanes[state] = Groups::fold(lanes[state], states[state].values + i);
    }
  }
  for (int state = 0; state < Rule::kStates; ++state) {
    now.in_fp32->largest[state] = Groups::largest(lanes[state]);
    all.scales[state][before.part.block] = scales_before[state].scale;
  }
}

template <typename Rule, typename Gradient>
ZEROPAGE_SET void step_blocks(const Rule& shared_rule, const QuantisedStretch& all) {
  // A copy: a store through a float pointer could change what is reached through references.
  const Rule rule = shared_rule;
  const auto* const gradients = static_cast<const Gradient*>(all.gradient);
  BlockInFp32 in_fp32[3];
  TurnedBlock before{.part = {}, .in_fp32 = &in_fp32[0]};
  TurnedBlock now{.part = {.numel = std::min(kStateBlockNumel - all.first_in_block, all.numel)},
                  .in_fp32 = &in_fp32[1]};
  TurnedBlock next{.part = {}, .in_fp32 = &in_fp32[2]};
  const auto is_whole = [](const TurnedBlock& of) { return of.part.numel == kStateBlockNumel; };
  load_states<Rule>(all, now.part, *now.in_fp32);
  while (now.part.numel > 0) {
    const int64_t end = now.part.first + now.part.numel;
    next.part = {now.part.block + 1, end, std::min(kStateBlockNumel, all.numel - end)};
    BlockScale scales[kMostStates];
    if (is_whole(before) && is_whole(now) && is_whole(next) &&
        make_scales<Rule>(*before.in_fp32, scales)) {
      turn<Rule, Gradient>(rule, all, before, scales, now, next);
    } else {
      if (next.part.numel > 0) load_states<Rule>(all, next.part, *next.in_fp32);
      update_block(rule, all.values + now.part.first, gradients + now.part.first,
                   all.gradient_scale, now.part.numel, *now.in_fp32);
      if (before.part.numel > 0) store_states<Rule>(all, before.part, *before.in_fp32);
    }
    BlockInFp32* const free = before.in_fp32;
    before = now;
    now = next;
    next.in_fp32 = free;
  }
  if (before.part.numel > 0) store_states<Rule>(all, before.part, *before.in_fp32);
}

}  // namespace
}  // namespace zeropage::optim::cpu
