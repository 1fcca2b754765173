// Which elements of a flat gradient belong to which sum of squares: what the kernel is given. Free of
// torch and of CUDA; optim/norm_table.h makes it.
#pragma once

#include <cstdint>

#include "optim/exact_digits.h"

namespace zeropage::optim {

// Flags that share a word.
inline constexpr int64_t kFlagsPerWord = 32;

// The squares of elements [begin, begin + numel) are added up. Blocks of 256, counted from `begin`, are
// what a warp takes at once.
struct NormPart {
  int64_t begin = 0;
  int64_t numel = 0;
  int64_t sum = 0;          // that the squares are added to
  int64_t flag = 0;         // that is set where a square is not finite
  int64_t first_block = 0;  // how many blocks the sum's parts before this one have
};

// The parts of one sum, one after the other.
struct NormRange {
  int64_t first_part = 0;
  int64_t parts = 0;
  int64_t blocks = 0;
};

// Where sums and flags are: kExactWords a sum, uncarried, then the words of flags.
struct NormWords {
  uint64_t* first = nullptr;
  int64_t sums = 0;
};

}  // namespace zeropage::optim
