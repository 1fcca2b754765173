// Who keeps memory on a rank's device from step to step for a model, beside its pages: optimizers, averages of its weights.
// Asked by who moves all of it away for a while (zero/setup/parking.h).
//
// Lifetime: shared by a model and what belongs to it; a holder is known as long as its owner keeps it. Threads: the
// training thread.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "zeropage/ledger.h"

namespace zeropage::zero {

// Called with tensors whose storages are memory of that kind, some perhaps on another device, and some several times.
using VisitMemory = std::function<void(const at::Tensor& memory, memory::Kind kind)>;

struct MemoryHolder {
  std::function<void(const VisitMemory& visit)> visit;
  // Lets work on it end. Returns why it cannot be moved now, or "".
  std::function<std::string()> settle;
};

class MemoryHolders {
 public:
  [[nodiscard]] std::shared_ptr<const MemoryHolder> add(MemoryHolder holder) {
    auto added = std::make_shared<const MemoryHolder>(std::move(holder));
    std::erase_if(holders_, [](const auto& known) { return known.expired(); });
    holders_.push_back(added);
    return added;
  }

  void visit(const VisitMemory& visit) const {
    for (const auto& known : holders_) {
      if (const auto holder = known.lock()) holder->visit(visit);
    }
  }
  // The first reason.
  std::string settle() const {
    std::string reason;
    for (const auto& known : holders_) {
      const auto holder = known.lock();
      if (holder && reason.empty()) reason = holder->settle();
    }
    return reason;
  }

 private:
  std::vector<std::weak_ptr<const MemoryHolder>> holders_;
};

}  // namespace zeropage::zero
