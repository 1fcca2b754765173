#include "memory/self_check.h"

#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/version.h>

#include "memory/check.h"

namespace zeropage::memory {
namespace {

thread_local bool probing = false;

// What is wrong; empty: nothing.
std::string fault_of(void (*probes)()) {
  const c10::InferenceMode off(false);
  const at::AutoGradMode with_grad(true);
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  struct Probing {
    Probing() { probing = true; }
    ~Probing() { probing = false; }
  };
  const Probing here;
  try {
    probes();
  } catch (const std::exception& error) {
    return message_of(error);
  }
  return "";
}

}  // namespace

SelfCheck::SelfCheck(std::string part, std::string without, void (*probes)())
    : part_(std::move(part)), without_(std::move(without)), probes_(probes) {}

void SelfCheck::require() {
  if (passed_.load(std::memory_order_acquire) || probing) return;
  const std::lock_guard lock(mutex_);
  if (!has_run_) fault_ = fault_of(probes_);
  has_run_ = true;
  const std::string without = without_.empty() ? "" : c10::str(", or ", without_);
  ZP_CHECK(fault_.empty(), "LibTorch ", TORCH_VERSION, " does not behave as Zeropage needs for ",
           part_, ": ", fault_, "; use a release that README.md names", without);
  passed_.store(true, std::memory_order_release);
}

void throw_unexpected(const char* what, const std::string& expected, const std::string& got) {
  TORCH_CHECK(false, what, ": expected ", expected, ", got ", got);
}

}  // namespace zeropage::memory
