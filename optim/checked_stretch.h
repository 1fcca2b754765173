// A stretch, checked, and as raw pointers.
#pragma once

#include <cstddef>
#include <span>

#include <ATen/core/Tensor.h>

#include "optim/flat_stretch.h"
#include "optim/stretch.h"

namespace zeropage::optim {

// Throws unless the stretch is as stretch.h says and has that many states.
void check_stretch(const Stretch& stretch, size_t states);
// The same of a stretch of which pieces are stepped: its states are fp32, of state_numel elements or more, and the
// others have numel or more.
void check_whole(const Stretch& stretch, size_t states, int64_t numel, int64_t state_numel);
// Throws unless it has that many states.
void check_as_many(const Stretch& stretch, size_t states);
// Throws unless found_inf is one number on the device, or undefined.
void check_found_inf(const GradientFactors& factors, const at::Device& device);
// Throws unless both are on one device.
void check_one_device(const Stretch& stretch, const Stretch& first);

// REQUIRES: checked, and not on the meta device. Without what the factors say, and without values and states where
// those are packed.
FlatStretch flat_of(const Stretch& stretch);
// The same with the factors.
FlatStretch flat_of(const Stretch& stretch, const GradientFactors& factors);
FlatStretch with_factors(FlatStretch flat, const GradientFactors& factors);

// Autograd then refuses a backward that would read the new values as if they were the old ones.
void bump_versions(const Stretch& stretch, const GradientFactors& factors);

// What a tensor is lies in three places of the heap, and that of many tensors in no cache: fetched
// together, they take little longer than one.
void prefetch_tensors(std::span<const Stretch> stretches);

}  // namespace zeropage::optim
