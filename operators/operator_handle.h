// A typed handle of an operator that this library registered with LibTorch's dispatcher.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace zeropage::operators {

// name: "zeropage::all_reduce". signature: the function that it was registered with. Throws where nobody registered it.
template <typename Function>
auto operator_of(const char* name, Function* /*signature*/) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Function>();
}

}  // namespace zeropage::operators
