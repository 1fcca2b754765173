// A stretch whose states are smaller than fp32, or whose values are split, as raw pointers: what
// the loops and kernels are given. Free of torch and of CUDA.
#pragma once

#include "optim/flat_stretch.h"
#include "optim/quantisation_map.h"
#include "optim/rounding_place.h"
#include "optim/split_value.h"
#include "zeropage/detail/state_format.h"

namespace zeropage::optim {

// All pointers are to elements or blocks of one device; they do not overlap.
struct PackedStretch {
  // Its states are null, and its values too where they are split.
  FlatStretch flat;
  StateFormat format = StateFormat::kFp32;
  void* states[kMostStates] = {};   // [numel] of the format
  float* scales[kMostStates] = {};  // k8Bit: [blocks]
  // The first element's place in its block of 256. Each block has a scale, also a cut one.
  int64_t first_in_block = 0;
  // kBf16: of the first element of the parameter; its states take tensors of their own.
  RoundingPlace place;
  BFloat16Bits* high = nullptr;  // split values; null: they are not
  uint16_t* low = nullptr;
};

// Parameters are numbered below it, and their states from it on.
inline constexpr uint64_t kFirstStateTensor = uint64_t{1} << 30;

// Where an element of a state, counted from the stretch's first, takes its random bits.
ZEROPAGE_ELEMENT RoundingPlace place_of_state(const PackedStretch& stretch, int state,
                                              int64_t element) {
  RoundingPlace place = stretch.place;
  place.tensor += kFirstStateTensor * static_cast<uint64_t>(state + 1);
  place.first_element += element;
  return place;
}

}  // namespace zeropage::optim
