// LibTorch's autocast on the host, in bf16, as long as it lives.
#pragma once

#include <ATen/autocast_mode.h>

namespace zeropage::testing {

class AutocastToBf16 {
 public:
  AutocastToBf16() {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    // LibTorch has one cache for all threads, and here these are ranks.
    at::autocast::set_autocast_cache_enabled(false);
  }
  ~AutocastToBf16() {
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::set_autocast_cache_enabled(true);
  }
  AutocastToBf16(const AutocastToBf16&) = delete;
  AutocastToBf16& operator=(const AutocastToBf16&) = delete;
};

}  // namespace zeropage::testing
