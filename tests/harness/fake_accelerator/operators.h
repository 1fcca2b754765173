// How an operator runs on the fake accelerator: sizes now, the CPU's kernel later, on the current
// stream.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace zeropage::testing {

// For any operator that computes: takes its arguments from the stack, pushes its results, whose
// values come when the current stream comes to them. Operators whose results' sizes or types
// depend on values wait for the stream, and are counted as host_syncs; those without sizes on the
// meta device, and random ones, wait too and are counted as not_async.
void run_on_fake_stream(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace zeropage::testing
