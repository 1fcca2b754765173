// A communicator whose operations pass the scenario before they begin.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "tests/simulated/scenario.h"
#include "zeropage/communicator.h"

namespace zeropage::simulated {

class CountedCommunicator final : public comm::Communicator {
 public:
  CountedCommunicator(std::unique_ptr<comm::Communicator> inner, std::shared_ptr<Scenario> scenario)
      : Communicator(inner->rank(), inner->size()),
        inner_(std::move(inner)),
        scenario_(std::move(scenario)) {}

  c10::Device device() const override { return inner_->device(); }
  bool moves(c10::Device there) const override { return inner_->moves(there); }
  std::vector<int> lost_ranks() override { return inner_->lost_ranks(); }
  std::shared_ptr<comm::detail::Watch> watch() const override { return inner_->watch(); }
  bool has_fixed_order() const override { return inner_->has_fixed_order(); }
  std::string_view transport() const override { return inner_->transport(); }

 private:
  using Tensor = at::Tensor;
  using ReduceOp = comm::ReduceOp;
  using Pending = comm::Pending;

  comm::Communicator& passed() {
    scenario_->at_collective(rank());
    return *inner_;
  }

  Pending start_all_gather(const Tensor& t, std::string what) override {
    return passed().all_gather(t, what);
  }
  Pending start_reduce_scatter(const Tensor& t, ReduceOp op, std::string what) override {
    return passed().reduce_scatter(t, op, what);
  }
  Pending start_all_reduce(const Tensor& t, ReduceOp op, std::string what) override {
    return passed().all_reduce(t, op, what);
  }
  Pending start_broadcast(const Tensor& t, int root, std::string what) override {
    return passed().broadcast(t, root, what);
  }
  Pending start_barrier(std::string what) override { return passed().barrier(what); }
  Pending start_send(const Tensor& t, int to, std::string what) override {
    return passed().send(t, to, what);
  }
  Pending start_recv(const Tensor& t, int from, std::string what) override {
    return passed().recv(t, from, what);
  }
  Pending start_reduce(const Tensor& t, ReduceOp op, int root, std::string what) override {
    return passed().reduce(t, op, root, what);
  }
  Pending start_gather(const Tensor& t, int root, std::string what) override {
    return passed().gather(t, root, what);
  }
  Pending start_scatter(const Tensor& t, int root, std::string what) override {
    return passed().scatter(t, root, what);
  }
  Pending start_all_to_all(const Tensor& given, const Tensor& to, std::string what) override {
    return passed().all_to_all(given, to, what);
  }
  comm::WireTraffic sent() const override { return inner_->wire_traffic(); }

  const std::unique_ptr<comm::Communicator> inner_;
  const std::shared_ptr<Scenario> scenario_;
};

}  // namespace zeropage::simulated
