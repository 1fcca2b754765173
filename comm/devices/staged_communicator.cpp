#include "comm/devices/staged_communicator.h"

#include <mutex>
#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>

#include "comm/detail/call.h"
#include "comm/detail/progress_thread.h"
#include "comm/devices/staging_buffer.h"
#include "device/page_locked.h"
#include "device/pending_on_device.h"
#include "zeropage/check.h"

namespace zeropage::comm {
namespace {

using detail::Slices;
using device::Event;
using device::Stream;
using device::StreamScope;

// Elements [first, first + count) of a tensor.
struct Piece {
  int64_t first = 0;
  int64_t count = 0;

  at::Tensor of(const at::Tensor& whole) const { return whole.narrow(0, first, count); }
};
using Pieces = std::vector<Piece>;

Pieces all_of(const at::Tensor& tensor) {
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
    Pieces down;
    Pieces up;
    // Where it goes up to, from behind the rest of the staging buffer; undefined: to the same tensor.
    at::Tensor received = {};
  };

  Pending start_all_gather(const at::Tensor& whole, std::string what) override {
    return start(whole, {.down = own_slice(whole), .up = other_slices(whole)},
                 [what = std::move(what)](Communicator& host, const at::Tensor& tensor) {
                   return host.all_gather(tensor, what);
                 });
  }

  Pending start_reduce_scatter(const at::Tensor& whole, ReduceOp op, std::string what) override {
    return start(whole, {.down = all_of(whole), .up = own_slice(whole)},
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
    return start(
        tensor,
        {.down = gives ? all_of(tensor) : Pieces(), .up = gives ? Pieces() : all_of(tensor)},
        [root, what = std::move(what)](Communicator& host, const at::Tensor& staged) {
          return host.broadcast(staged, root, what);
        });
  }

  Pending start_reduce(const at::Tensor& tensor, ReduceOp op, int root, std::string what) override {
    return start(tensor, {.down = all_of(tensor), .up = rank() == root ? all_of(tensor) : Pieces()},
                 [op, root, what = std::move(what)](Communicator& host, const at::Tensor& staged) {
                   return host.reduce(staged, op, root, what);
                 });
  }

  Pending start_gather(const at::Tensor& tensor, int root, std::string what) override {
    Moves moves{.down = all_of(tensor), .up = {}};
    if (rank() == root) moves = {.down = own_slice(tensor), .up = other_slices(tensor)};
    return start(tensor, moves,
                 [root, what = std::move(what)](Communicator& host, const at::Tensor& staged) {
                   return host.gather(staged, root, what);
                 });
  }

  Pending start_scatter(const at::Tensor& tensor, int root, std::string what) override {
    const bool gives = rank() == root;
    return start(
        tensor,
        {.down = gives ? all_of(tensor) : Pieces(), .up = gives ? Pieces() : all_of(tensor)},
        [root, what = std::move(what)](Communicator& host, const at::Tensor& staged) {
          return host.scatter(staged, root, what);
        });
  }

  // The staging buffer holds what is given, and behind it what is received.
  Pending start_all_to_all(const at::Tensor& given, const at::Tensor& received,
                           std::string what) override {
    const int64_t numel = given.numel();
    return start(given, {.down = all_of(given), .up = all_of(received), .received = received},
                 [given, received, numel, what = std::move(what)](Communicator& host,
                                                                  const at::Tensor& staged) {
                   if (staged.is_same(given)) return host.all_to_all(given, received, what);
                   return host.all_to_all(staged.narrow(0, 0, numel),
                                          staged.narrow(0, numel, numel), what);
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

  Pieces own_slice(const at::Tensor& whole) const {
    const Slices slices = Slices::even(whole.numel(), size());
    return {{slices.first(rank()), slices.count(rank())}};
  }
  Pieces other_slices(const at::Tensor& whole) const {
    const Slices slices = Slices::even(whole.numel(), size());
    const int64_t end = slices.first(rank() + 1);
    return {{0, slices.first(rank())}, {end, whole.numel() - end}};
  }

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
        [this, tensor, moves, operation = std::move(operation), on_device,
         begun = Stream::current(device_).record()] {
          on_device->end = perform(tensor, moves, begun, operation);
        },
        {tensor, moves.received});
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
    const bool is_apart = moves.received.defined();
    const int64_t numel = tensor.numel();
    const at::Tensor staged = staging_.take(is_apart ? 2 * numel : numel, tensor.scalar_type());
    copies_.wait(begun);
    {
      const StreamScope scope(copies_);
      for (const Piece& piece : moves.down) {
        device::start_copy(piece.of(staged), piece.of(tensor));
      }
    }
    copies_.record().synchronize();
    start_on_host([&](Communicator& host) { return operation(host, staged); }).wait();
    const at::Tensor& up_to = is_apart ? moves.received : tensor;
    const at::Tensor arrived = is_apart ? staged.narrow(0, numel, numel) : staged;
    {
      const StreamScope scope(copies_);
      for (const Piece& piece : moves.up) {
        device::start_copy(piece.of(up_to), piece.of(arrived));
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
