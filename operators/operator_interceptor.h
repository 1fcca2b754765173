// Sees every operator that a thread runs, before autograd does.
//
// For what must know operators and not only modules: recording a construction, recomputing what
// was not kept. A thread that has none pays nothing.
//
// Lifetime: an interceptor outlives its scopes.
// Threads: a scope concerns its thread alone; operators that autograd runs on threads of its own
// are not seen.
#pragma once

#include <memory>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>

namespace zeropage::operators {

class OperatorInterceptor {
 public:
  OperatorInterceptor() = default;
  OperatorInterceptor(const OperatorInterceptor&) = delete;
  OperatorInterceptor& operator=(const OperatorInterceptor&) = delete;
  virtual ~OperatorInterceptor() = default;

  // In place of the operator: takes its arguments from the end of the stack and leaves its results
  // there. Operators that it runs itself are not seen. keys: for the two calls below.
  virtual void run(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
                   torch::jit::Stack& stack) = 0;

  // The interceptor of the calling thread's innermost scope; null without one.
  static OperatorInterceptor* current();
};

// Runs something else in the place of an operator, wherever in a scope a thread runs it: within other operators too, unless an
// interceptor runs those as a whole. The thread's interceptor sees what is run instead, and not the operator.
class OperatorReplacement {
 public:
  OperatorReplacement() = default;
  OperatorReplacement(const OperatorReplacement&) = delete;
  OperatorReplacement& operator=(const OperatorReplacement&) = delete;
  virtual ~OperatorReplacement() = default;

  virtual bool replaces(const c10::OperatorHandle& handle) const = 0;
  // Takes the operator's arguments from the end of the stack and leaves the results there. Nothing is replaced meanwhile.
  virtual void run(torch::jit::Stack& stack) = 0;
};

// The calling thread's; null without one. A region that repeats its forward puts it back (checkpointing/detail/thread_modes.h).
const std::shared_ptr<OperatorReplacement>& current_replacement();
void set_current_replacement(std::shared_ptr<OperatorReplacement> replacement);

class ReplacementScope {
 public:
  // null: nothing is replaced.
  explicit ReplacementScope(std::shared_ptr<OperatorReplacement> replacement);
  ~ReplacementScope();
  ReplacementScope(const ReplacementScope&) = delete;
  ReplacementScope& operator=(const ReplacementScope&) = delete;

 private:
  std::shared_ptr<OperatorReplacement> before_;
};

// Throws unless this LibTorch's dispatcher treats interceptors as this header says.
// Every scope with an interceptor calls it; cheap after the first call.
void check_interceptor();

// While it lives, the calling thread's operators go to `interceptor`; to none if it is null.
class InterceptorScope {
 public:
  explicit InterceptorScope(OperatorInterceptor* interceptor);
  ~InterceptorScope();
  InterceptorScope(const InterceptorScope&) = delete;
  InterceptorScope& operator=(const InterceptorScope&) = delete;

 private:
  OperatorInterceptor* const before_;
  const bool was_included_;
  const bool was_excluded_;
};

// Runs an operator from within OperatorInterceptor::run.
void run_operator(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
                  torch::jit::Stack& stack);
// The same, and the operators that it calls are seen.
void run_operator_from_outside(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
                               torch::jit::Stack& stack);

}  // namespace zeropage::operators
