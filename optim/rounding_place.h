// Which random bits the stochastic rounding of an element takes. Free of torch and of CUDA.
//
// Element e of a tensor takes lane e % 8 of the Philox block e / 8: lane l is the lower (l even) or
// upper half of the block's word l / 2. The key is the seed. The counter's word 0 is the block's
// lower half, word 2 that of the step, word 1 the upper 16 bits of both, the step's above; word 3 is
// the tensor.
#pragma once

#include "optim/low_precision.h"
#include "optim/philox.h"

namespace zeropage::optim {

// The bits depend on nothing else: any split over ranks, calls and threads rounds alike.
struct RoundingPlace {
  uint64_t seed = 0;
  uint64_t step = 0;          // less than 2^48
  uint64_t tensor = 0;        // which one: the parameter's number, say; less than 2^32
  int64_t first_element = 0;  // of what is rounded, in that tensor; the last is less than 2^51
};

inline constexpr int kRoundingLanes = 8;
inline constexpr uint64_t kMostRoundingSteps = uint64_t{1} << 48;
inline constexpr uint64_t kMostRoundingTensors = uint64_t{1} << 32;
inline constexpr int64_t kMostRoundingNumel = int64_t{1} << 51;

ZEROPAGE_ELEMENT PhiloxCounter counter_of(const RoundingPlace& place, uint64_t block) {
  return {{static_cast<uint32_t>(block),
           static_cast<uint32_t>(block >> 32) | static_cast<uint32_t>(place.step >> 32) << 16,
           static_cast<uint32_t>(place.step), static_cast<uint32_t>(place.tensor)}};
}

ZEROPAGE_ELEMENT PhiloxKey key_of(const RoundingPlace& place) {
  return {{static_cast<uint32_t>(place.seed), static_cast<uint32_t>(place.seed >> 32)}};
}

ZEROPAGE_ELEMENT PhiloxBlock random_block(const RoundingPlace& place, uint64_t block) {
  return philox(counter_of(place, block), key_of(place));
}

// lane: 0 to kRoundingLanes - 1. Known when compiled, in a kernel: else the block is in memory.
ZEROPAGE_ELEMENT uint32_t lane_of(const PhiloxBlock& random, int lane) {
  return random.words[lane / 2] >> (lane % 2 * 16) & 0xffffU;
}

}  // namespace zeropage::optim
