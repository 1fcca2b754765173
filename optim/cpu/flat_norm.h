// Sums of squares and the look for infinities as loops over raw pointers. Free of torch.
#pragma once

#include "optim/cpu/instructions.h"
#include "optim/exact_digits.h"
#include "optim/exact_squares.h"

namespace zeropage::optim::cpu {

// Adds the squares of elements [begin, end), each exactly, to `sum`. Returns whether all of them are
// finite. The sum depends neither on the order of calls nor on where they cut the elements.
bool add_squares(const FlatElements& flat, int64_t begin, int64_t end, ExactDigits& sum,
                 Instructions instructions = Instructions::kAvx512);

// Whether one of elements [begin, end) is infinite or NaN.
bool any_not_finite(const FlatElements& flat, int64_t begin, int64_t end);

}  // namespace zeropage::optim::cpu
