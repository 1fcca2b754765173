#include "memory/self_check.h"

#include <memory>
#include <thread>
#include <utility>

#include <torch/version.h>

#include "zeropage/check.h"
#include "zeropage/ledger.h"

namespace zeropage::memory {
namespace {

thread_local bool probing = false;

// What is wrong; empty: nothing. The caller may be anywhere, such as in the repetition of a region, with hooks
// on what autograd saves; a thread of its own has no mode, no hooks and nobody's ledger.
std::string fault_of(void (*probes)()) {
  std::string fault;
  std::thread([&] {
    const LedgerScope nobodys(std::make_shared<Ledger>("self-check"));
    probing = true;
    try {
      probes();
    } catch (const std::exception& error) {
      fault = message_of(error);
    }
  }).join();
  return fault;
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
