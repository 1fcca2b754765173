#include "operators/operator_interceptor.h"

#include <utility>

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "operators/dispatch_keys.h"

namespace zeropage::operators {
namespace {

thread_local OperatorInterceptor* current_interceptor = nullptr;

std::shared_ptr<OperatorReplacement>& replacement_of_thread() {
  thread_local std::shared_ptr<OperatorReplacement> replacement;
  return replacement;
}

bool sees_operators() {
  return current_interceptor != nullptr || replacement_of_thread() != nullptr;
}

OperatorInterceptor* checked(OperatorInterceptor* interceptor) {
  if (interceptor != nullptr) check_interceptor();
  return interceptor;
}

c10::DispatchKeySet below_us(c10::DispatchKeySet keys) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kInterceptorKey);
}

class Excluded {
 public:
  explicit Excluded(bool excluded)
      : before_(c10::impl::tls_is_dispatch_key_excluded(kInterceptorKey)) {
    c10::impl::tls_set_dispatch_key_excluded(kInterceptorKey, excluded);
  }
  ~Excluded() { c10::impl::tls_set_dispatch_key_excluded(kInterceptorKey, before_); }
  Excluded(const Excluded&) = delete;
  Excluded& operator=(const Excluded&) = delete;

 private:
  const bool before_;
};

void intercept(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
               torch::jit::Stack* stack) {
  if (const auto replacement = replacement_of_thread();
      replacement != nullptr && replacement->replaces(handle)) {
    const ReplacementScope as_they_are(nullptr);
    return replacement->run(*stack);
  }
  const Excluded inner(true);
  if (OperatorInterceptor* interceptor = OperatorInterceptor::current()) {
    interceptor->run(handle, keys, *stack);
  } else {
    run_operator(handle, keys, *stack);
  }
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  static_assert(kInterceptorKey == c10::DispatchKey::TESTING_ONLY_GenericMode);
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&intercept>());
}

}  // namespace

OperatorInterceptor* OperatorInterceptor::current() {
  return current_interceptor;
}

const std::shared_ptr<OperatorReplacement>& current_replacement() {
  return replacement_of_thread();
}

void set_current_replacement(std::shared_ptr<OperatorReplacement> replacement) {
  if (replacement != nullptr) check_interceptor();
  replacement_of_thread() = std::move(replacement);
  c10::impl::tls_set_dispatch_key_included(kInterceptorKey, sees_operators());
}

ReplacementScope::ReplacementScope(std::shared_ptr<OperatorReplacement> replacement)
    : before_(current_replacement()) {
  set_current_replacement(std::move(replacement));
}

ReplacementScope::~ReplacementScope() {
  set_current_replacement(std::move(before_));
}

InterceptorScope::InterceptorScope(OperatorInterceptor* interceptor)
    : before_(std::exchange(current_interceptor, checked(interceptor))),
      was_included_(c10::impl::tls_is_dispatch_key_included(kInterceptorKey)),
      was_excluded_(c10::impl::tls_is_dispatch_key_excluded(kInterceptorKey)) {
  c10::impl::tls_set_dispatch_key_included(kInterceptorKey, sees_operators());
  // A scope may begin within an operator of an outer one.
  c10::impl::tls_set_dispatch_key_excluded(kInterceptorKey, false);
}

InterceptorScope::~InterceptorScope() {
  current_interceptor = before_;
  c10::impl::tls_set_dispatch_key_included(kInterceptorKey, was_included_);
  c10::impl::tls_set_dispatch_key_excluded(kInterceptorKey, was_excluded_);
}

void run_operator(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
                  torch::jit::Stack& stack) {
  handle.redispatchBoxed(below_us(keys), &stack);
}

void run_operator_from_outside(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
                               torch::jit::Stack& stack) {
  const Excluded inner(false);
  handle.redispatchBoxed(below_us(keys), &stack);
}

}  // namespace zeropage::operators
