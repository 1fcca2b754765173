// What ranks give to a reduction in tests, and what must come out.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include <torch/torch.h>

#include "zeropage/ledger.h"

namespace zeropage::testing {

// What rank r contributes; the same on whichever rank asks. Drawn once: every rank asks for all of them,
// which took most of the time of these tests.
inline torch::Tensor contribution(int rank, int64_t numel,
                                  torch::ScalarType dtype = torch::kFloat32) {
  static std::mutex mutex;
  static std::map<std::pair<int, int64_t>, torch::Tensor> drawn;
  torch::Tensor values;
  {
    const std::lock_guard lock(mutex);
    torch::Tensor& known = drawn[{rank, numel}];
    if (!known.defined()) {
      const memory::LedgerScope nobodys(std::make_shared<memory::Ledger>("contributions"));
      known =
          torch::randn({numel}, at::detail::createCPUGenerator(static_cast<uint64_t>(1000 + rank)));
    }
    values = known;
  }
  return values.to(dtype, /*non_blocking=*/false, /*copy=*/true);
}

// In fp32, not divided.
inline torch::Tensor tree_sum(int low, int high, int64_t numel,
                              torch::ScalarType dtype = torch::kFloat32) {
  if (high - low == 1) return contribution(low, numel, dtype).to(torch::kFloat32);
  int half = 1;
  while (half * 2 < high - low) half *= 2;
  return tree_sum(low, low + half, numel, dtype) + tree_sum(low + half, high, numel, dtype);
}

}  // namespace zeropage::testing
