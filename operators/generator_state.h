// The states of random generators as values: copied, compared and put back.
//
// Threads: any, each generator is locked while its state is copied or set. Throws c10::Error where the
// generators are of different kinds.
#pragma once

#include <ATen/core/Generator.h>

namespace zeropage::operators {

// The state of now, in a generator of its own.
at::Generator copy_of(const at::Generator& generator);

// from: one that nobody draws from meanwhile, such as a copy.
void assign_state(const at::Generator& to, const at::Generator& from);

// Whether both would draw the same numbers. Both as `from`.
bool same_state(const at::Generator& left, const at::Generator& right);

}  // namespace zeropage::operators
