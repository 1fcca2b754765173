// The two dispatch keys that LibTorch leaves to wrappers outside its tree, named here and nowhere
// else.
//
// LibTorch uses them in its own tests only. Both lie above autograd, so what is registered for them
// sees an operator before anything is recorded or computed. paging/trap_check and
// operators/interceptor_check try at the first use whether they behave so.
#pragma once

#include <c10/core/DispatchKey.h>

namespace zeropage::operators {

// On a tensor whose storage is paged: every operator that takes it goes through paging/trap.
inline constexpr auto kTrapKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

// On a thread with an InterceptorScope: every operator goes through operators/operator_interceptor.
inline constexpr auto kInterceptorKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

}  // namespace zeropage::operators
