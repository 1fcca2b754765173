// The bytes that operators read and write, but for matrix products, convolutions and attention, whose time follows
// from their FLOPs. Views touch nothing.
//
// Lifetime, threads: as of any OperatorInterceptor.
#pragma once

#include "operators/operator_interceptor.h"

namespace zeropage::planning {

class TouchedBytes final : public operators::OperatorInterceptor {
 public:
  void run(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
           torch::jit::Stack& stack) override;

  double bytes() const { return bytes_; }

 private:
  double bytes_ = 0;
};

}  // namespace zeropage::planning
