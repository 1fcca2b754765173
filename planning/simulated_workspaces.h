// What matrix products keep of a device from the first one on, in a simulated world: as tensors without memory, which
// its ledger counts.
//
// Lifetime: the tensors stay until this goes. Threads: the one whose ledger it is.
#pragma once

#include <optional>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "zeropage/device.h"

namespace zeropage::planning {

class SimulatedWorkspaces {
 public:
  explicit SimulatedWorkspaces(const memory::ProductWorkspaces& sizes) : sizes_(sizes) {}

  // Before the first products of a forward, and of a backward, which runs on another thread of LibTorch's. Later
  // calls do nothing.
  void before_forward();
  void before_backward();

 private:
  using Workspaces = std::vector<at::Tensor>;

  const memory::ProductWorkspaces sizes_;
  std::optional<Workspaces> of_forward_;
  std::optional<Workspaces> of_backward_;
};

}  // namespace zeropage::planning
