// A communicator whose operations begin late, by a random time that differs from rank to rank. Code
// that forgets to wait for a Pending then reads bytes that are not there yet.
#pragma once

#include <functional>
#include <random>
#include <string>
#include <thread>

#include "comm/detail/progress_thread.h"
#include "device/pending_on_device.h"
#include "zeropage/communicator.h"

namespace zeropage::testing {

class DelayedCommunicator final : public comm::Communicator {
 public:
  // on_send: called in each send(), before it is late.
  DelayedCommunicator(std::unique_ptr<comm::Communicator> inner, std::chrono::milliseconds longest,
                      std::function<void(const std::string& what)> on_send = {})
      : Communicator(inner->rank(), inner->size()),
        inner_(std::move(inner)),
        on_send_(std::move(on_send)),
        random_(static_cast<unsigned>(rank())),
        milliseconds_(0, static_cast<int>(longest.count())) {}

  c10::Device device() const override { return inner_->device(); }
  bool moves(c10::Device there) const override { return inner_->moves(there); }
  std::vector<int> lost_ranks() override { return inner_->lost_ranks(); }
  std::string_view transport() const override { return inner_->transport(); }

 private:
  using Tensor = at::Tensor;
  using ReduceOp = comm::ReduceOp;
  using Pending = comm::Pending;

  // On a device the delay is between what was enqueued before the call and the operation.
  template <typename Operation>
  Pending late(const Tensor& tensor, Operation operation) {
    const auto delay = std::chrono::milliseconds(milliseconds_(random_));
    auto on_device = std::make_shared<Pending::OnDevice>(
        Pending::OnDevice{.device = device(), .end = {}, .check = {}});
    const Pending on_host = thread_.run(
        [this, delay, operation, on_device, begun = device::Stream::current(device()).record()] {
          std::this_thread::sleep_for(delay);
          const device::StreamScope scope(stream_);
          stream_.wait(begun);
          operation().wait();
          on_device->end = stream_.record();
        },
        {tensor});
    return {on_host, on_device};
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
    if (on_send_) on_send_(what);
    return late(t, [=, this] { return inner_->send(t, to_rank, what); });
  }
  Pending start_recv(const Tensor& t, int from_rank, std::string what) override {
    return late(t, [=, this] { return inner_->recv(t, from_rank, what); });
  }
  Pending start_reduce(const Tensor& t, ReduceOp op, int root, std::string what) override {
    return late(t, [=, this] { return inner_->reduce(t, op, root, what); });
  }
  Pending start_gather(const Tensor& t, int root, std::string what) override {
    return late(t, [=, this] { return inner_->gather(t, root, what); });
  }
  Pending start_scatter(const Tensor& t, int root, std::string what) override {
    return late(t, [=, this] { return inner_->scatter(t, root, what); });
  }
  Pending start_all_to_all(const Tensor& given, const Tensor& received, std::string what) override {
    return late(given, [=, this] { return inner_->all_to_all(given, received, what); });
  }
  comm::WireTraffic sent() const override { return inner_->wire_traffic(); }

  const std::unique_ptr<comm::Communicator> inner_;
  const std::function<void(const std::string& what)> on_send_;
  const device::Stream stream_ = device::Stream::another(device());
  std::mt19937 random_;
  std::uniform_int_distribution<int> milliseconds_;
  comm::detail::ProgressThread thread_;  // last: its tasks use everything above
};

}  // namespace zeropage::testing
