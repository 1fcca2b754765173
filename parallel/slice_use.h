// What an operator would do with a slice that it takes for a whole tensor.
//
// Threads: any; a pure function.
#pragma once

#include <cstdint>

#include <ATen/core/dispatch/Dispatcher.h>

namespace zeropage::parallel {

enum class SliceUse : uint8_t {
  kSizes,     // no values are read: new_zeros(), zeros_like(), detach()
  kElements,  // the same is done to each element: add_(), clone(), lerp(), copy_(), _foreach_mul_()
  kFigures,   // figures of all elements: norms, sums, comparisons
  kDrawsLike,  // random numbers of the tensor's sizes: randn_like()
  kDraws,      // other random numbers: normal_(), dropout()
  kOther,      // products, views, indices, and what is not known
};

// By the operator's name and tags.
SliceUse slice_use_of(const c10::OperatorHandle& op);

}  // namespace zeropage::parallel
