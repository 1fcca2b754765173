// The communicator of a world of one: every operation has ended when it returns, and a mean is the
// value itself.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>

#include "comm/communicator.h"

namespace zeropage::comm {

class SoloCommunicator final : public Communicator {
 public:
  explicit SoloCommunicator(c10::Device device = c10::kCPU)
      : Communicator(/*rank=*/0, /*size=*/1), device_(device) {}

  c10::Device device() const override { return device_; }
  bool moves(c10::Device there) const override { return there == device_ || there.is_cpu(); }
  std::string_view transport() const override { return "solo"; }

 private:
  Pending start_all_gather(const at::Tensor&, std::string) override { return {}; }
  Pending start_reduce_scatter(const at::Tensor&, ReduceOp, std::string) override { return {}; }
  Pending start_all_reduce(const at::Tensor&, ReduceOp, std::string) override { return {}; }
  Pending start_broadcast(const at::Tensor&, int, std::string) override { return {}; }
  Pending start_barrier(std::string) override { return {}; }
  // Unreachable: the base refuses a peer that is this rank, and there is no other.
  Pending start_send(const at::Tensor&, int, std::string) override { return {}; }
  Pending start_recv(const at::Tensor&, int, std::string) override { return {}; }
  WireTraffic sent() const override { return {}; }
  Pending start_reduce(const at::Tensor&, ReduceOp, int, std::string) override { return {}; }
  Pending start_gather(const at::Tensor&, int, std::string) override { return {}; }
  Pending start_scatter(const at::Tensor&, int, std::string) override { return {}; }
  Pending start_all_to_all(const at::Tensor& given, const at::Tensor& received,
                           std::string) override {
    // Writes bytes as other communicators do: autograd and its counters see nothing.
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    received.copy_(given);
    return {};
  }

  const c10::Device device_;
};

}  // namespace zeropage::comm
