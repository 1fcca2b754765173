// A communicator whose operations begin late, by a random time that differs from rank to rank. Code
// that forgets to wait for a Pending then reads bytes that are not there yet.
#pragma once

#include <random>
#include <thread>

#include "comm/communicator.h"
#include "comm/detail/progress_thread.h"

namespace zeropage::testing {

class DelayedCommunicator final : public comm::Communicator {
 public:
  DelayedCommunicator(std::unique_ptr<comm::Communicator> inner, std::chrono::milliseconds longest)
      : Communicator(inner->rank(), inner->size()),
        inner_(std::move(inner)),
        random_(static_cast<unsigned>(rank())),
        milliseconds_(0, static_cast<int>(longest.count())) {}

  c10::Device device() const override { return inner_->device(); }
  std::vector<int> lost_ranks() override { return inner_->lost_ranks(); }
  std::string_view transport() const override { return inner_->transport(); }

 private:
  using Tensor = at::Tensor;
  using ReduceOp = comm::ReduceOp;
  using Pending = comm::Pending;

  template <typename Operation>
  Pending late(const Tensor& tensor, Operation operation) {
    const auto delay = std::chrono::milliseconds(milliseconds_(random_));
    return thread_.run(
        [delay, operation] {
          std::this_thread::sleep_for(delay);
          operation().wait();
        },
        {tensor});
  }

  Pending start_all_gather(const Tensor& t, std::string what) override {
    return late(t, [=, this] { return inner_->all_gather(t, what); });
  }
  Pending start_reduce_scatter(const Tensor& t, ReduceOp op, std::string what) override {
    return late(t, [=, this] { return inner_->reduce_scatter(t, op, what); });
  }
  Pending start_all_reduce(const Tensor& t, ReduceOp op, std::string what) override {
    return late(t, [=, this] { return inner_->all_reduce(t, op, what); });
  }
  Pending start_broadcast(const Tensor& t, int root, std::string what) override {
    return late(t, [=, this] { return inner_->broadcast(t, root, what); });
  }
  Pending start_barrier(std::string what) override {
    return late({}, [=, this] { return inner_->barrier(what); });
  }
  Pending start_send(const Tensor& t, int to_rank, std::string what) override {
    return late(t, [=, this] { return inner_->send(t, to_rank, what); });
  }
  Pending start_recv(const Tensor& t, int from_rank, std::string what) override {
    return late(t, [=, this] { return inner_->recv(t, from_rank, what); });
  }
  comm::WireTraffic sent() const override { return inner_->wire_traffic(); }

  const std::unique_ptr<comm::Communicator> inner_;
  std::mt19937 random_;
  std::uniform_int_distribution<int> milliseconds_;
  comm::detail::ProgressThread thread_;  // last: its tasks use everything above
};

}  // namespace zeropage::testing
