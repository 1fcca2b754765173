#include "comm/devices/staged_communicator.h"

#include <mutex>
#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>

#include "comm/detail/call.h"
#include "comm/detail/progress_thread.h"
#include "comm/devices/staging_buffer.h"
#include "device/pending_on_device.h"
#include "memory/check.h"

namespace zeropage::comm {
namespace {

using detail::Slices;
using memory::Event;
using memory::Stream;
using memory::StreamScope;

// Elements [first, first + count) of a tensor.
struct Part {
  int64_t first = 0;
  int64_t count = 0;

  at::Tensor of(const at::Tensor& whole) const { return whole.narrow(0, first, count); }
};
using Parts = std::vector<Part>;

Parts all_of(const at::Tensor& tensor) {
  return {{0, tensor.numel()}};
}

class StagedCommunicator final : public Communicator {
 public:
  StagedCommunicator(std::unique_ptr<Communicator> host, c10::Device device)
      : Communicator(host->rank(), host->size()),
        device_(device),
        transport_(c10::str(host->transport(), ", staged")),
        host_(std::move(host)) {}

  // What is under way waits for other ranks, and ends when the host communicator does.
  ~StagedCommunicator() override {
    std::unique_ptr<Communicator> host;
    {
      const std::lock_guard lock(host_mutex_);
      host = std::move(host_);
    }
  }

  c10::Device device() const override { return device_; }
  bool moves(c10::Device there) const override { return there == device_ || there.is_cpu(); }
  std::string_view transport() const override { return transport_; }
  std::vector<int> lost_ranks() override { return host_->lost_ranks(); }

 private:
  // What this rank gives and what it gets, in a tensor on the device.
  struct Moves {
    Parts down;
    Parts up;
  };

  Pending start_all_gather(const at::Tensor& whole, std::string what) override {
    const Slices slices = Slices::even(whole.numel(), size());
    const int64_t first = slices.first(rank());
    const int64_t end = slices.first(rank() + 1);
    return start(whole,
                 {.down = {{first, end - first}}, .up = {{0, first}, {end, whole.numel() - end}}},
                 [what = std::move(what)](Communicator& host, const at::Tensor& tensor) {
                   return host.all_gather(tensor, what);
                 });
  }

  Pending start_reduce_scatter(const at::Tensor& whole, ReduceOp op, std::string what) override {
    const Slices slices = Slices::even(whole.numel(), size());
    return start(whole,
                 {.down = all_of(whole), .up = {{slices.first(rank()), slices.count(rank())}}},
                 [op, what = std::move(what)](Communicator& host, const at::Tensor& tensor) {
                   return host.reduce_scatter(tensor, op, what);
                 });
  }

  Pending start_all_reduce(const at::Tensor& tensor, ReduceOp op, std::string what) override {
    return start(tensor, {.down = all_of(tensor), .up = all_of(tensor)},
                 [op, what = std::move(what)](Communicator& host, const at::Tensor& staged) {
                   return host.all_reduce(staged, op, what);
                 });
  }

  Pending start_broadcast(const at::Tensor& tensor, int root, std::string what) override {
    const bool gives = rank() == root;
    return start(tensor,
                 {.down = gives ? all_of(tensor) : Parts(), .up = gives ? Parts() : all_of(tensor)},
                 [root, what = std::move(what)](Communicator& host, const at::Tensor& staged) {
                   return host.broadcast(staged, root, what);
                 });
  }

  Pending start_barrier(std::string what) override {
    return progress_.run(
        [this, what = std::move(what)] {
          start_on_host([&](Communicator& host) { return host.barrier(what); }).wait();
        },
        {});
  }

  Pending start_send(const at::Tensor& tensor, int to_rank, std::string what) override {
    return start(tensor, {.down = all_of(tensor), .up = {}},
                 [to_rank, what = std::move(what)](Communicator& host, const at::Tensor& staged) {
                   return host.send(staged, to_rank, what);
                 });
  }

  Pending start_recv(const at::Tensor& tensor, int from_rank, std::string what) override {
    return start(tensor, {.down = {}, .up = all_of(tensor)},
                 [from_rank, what = std::move(what)](Communicator& host, const at::Tensor& staged) {
                   return host.recv(staged, from_rank, what);
                 });
  }

  WireTraffic sent() const override { return host_->wire_traffic(); }

  // operation(host, tensor on the host) -> Pending
  template <typename Operation>
  Pending start(const at::Tensor& tensor, Moves moves, Operation operation) {
    if (tensor.is_cpu()) {
      return progress_.run(
          [this, tensor, operation = std::move(operation)] {
            start_on_host([&](Communicator& host) { return operation(host, tensor); }).wait();
          },
          {tensor});
    }
    // Its end is written before the part on the host has ended, and read after that.
    auto on_device = std::make_shared<Pending::OnDevice>(
        Pending::OnDevice{.device = device_, .end = {}, .check = {}});
    Pending on_host = progress_.run(
        [this, tensor, moves = std::move(moves), operation = std::move(operation), on_device,
         begun = Stream::current(device_).record()] {
          on_device->end = perform(tensor, moves, begun, operation);
        },
        {tensor});
    return {on_host, on_device};
  }

  // On the thread that performs. Returns the end of the copy back.
  template <typename Operation>
  Event perform(const at::Tensor& tensor, const Moves& moves, const Event& begun,
                const Operation& operation) {
    // Writes bytes as a communicator on the host does: autograd and its counters see nothing.
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    // The buffer may have to grow, and is read by the last copy back until that ends.
    last_end_.synchronize();
    const at::Tensor staged = staging_.take(tensor.numel(), tensor.scalar_type());
    copies_.wait(begun);
    {
      const StreamScope scope(copies_);
      for (const Part& part : moves.down) {
        part.of(staged).copy_(part.of(tensor), /*non_blocking=*/true);
      }
    }
    copies_.record().synchronize();
    start_on_host([&](Communicator& host) { return operation(host, staged); }).wait();
    {
      const StreamScope scope(copies_);
      for (const Part& part : moves.up) {
        part.of(tensor).copy_(part.of(staged), /*non_blocking=*/true);
      }
    }
    return last_end_ = copies_.record();
  }

  template <typename Start>
  Pending start_on_host(const Start& start) {
    const std::lock_guard lock(host_mutex_);
    ZP_CHECK(host_,
             "the communicator was destroyed with operations in flight; wait for them first");
    return start(*host_);
  }

  // Constant after construction.
  const c10::Device device_;
  const std::string transport_;
  const Stream copies_ = Stream::another(device_);

  // Owned by the thread that performs.
  detail::StagingBuffer staging_{device_};
  Event last_end_;

  std::mutex host_mutex_;
  std::unique_ptr<Communicator> host_;  // guarded by host_mutex_ once it is being destroyed

  detail::ProgressThread progress_;  // last: its thread uses everything above
};

}  // namespace

std::unique_ptr<Communicator> make_staged_communicator(std::unique_ptr<Communicator> host,
                                                       c10::Device device) {
  return std::make_unique<StagedCommunicator>(std::move(host), device);
}

}  // namespace zeropage::comm
