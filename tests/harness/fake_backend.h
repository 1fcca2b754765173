// A c10d backend for the fake accelerator that works as NCCL does. A collective with asyncOp = false runs
// on the caller's current stream, and there is no Work. Others, and messages between pairs, run on a
// stream of the backend's, which waits for the caller's at the call; Work::wait() makes the then-current
// stream wait. A communicator of the host carries the bytes, on the stream's thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "device/stream.h"
#include "tests/harness/fake_accelerator/counters.h"
#include "tests/harness/fake_accelerator/host_view.h"
#include "tests/harness/fake_accelerator/stream.h"
#include "zeropage/communicator.h"

namespace zeropage::testing {

class FakeBackend final : public c10d::Backend {
 public:
  enum class Streams : uint8_t {
    kAsNccl,
    kOwnAlone,  // whatever asyncOp says, as backends older than it
  };

  FakeBackend(std::unique_ptr<comm::Communicator> host, c10::Device device,
              Streams streams = Streams::kAsNccl)
      : c10d::Backend(host->rank(), host->size()),
        device_(device),
        streams_(streams),
        stream_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)),
        host_(std::move(host)) {}

  // What is under way ends.
  void abort() override {
    std::unique_ptr<comm::Communicator> host;
    {
      const std::lock_guard lock(mutex_);
      host = std::move(host_);
    }
    aborted_.notify_all();
  }
  void shutdown() override { abort(); }

  // Operations so far that ran on the backend's own stream.
  int64_t hops() const { return hops_; }

  using Work = c10::intrusive_ptr<c10d::Work>;

  Work _allgather_base(at::Tensor& whole, at::Tensor& own,
                       const c10d::AllgatherOptions& options) override {
    TORCH_CHECK(whole.numel() == own.numel() * getSize());
    return enqueue(options.asyncOp, [this, whole = host_view(whole), own = host_view(own)] {
      slice(whole, getRank()).copy_(own);
      run([&](comm::Communicator& host) { return host.all_gather(whole, "a fake gather"); });
    });
  }

  Work _reduce_scatter_base(at::Tensor& own, at::Tensor& whole,
                            const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(whole.numel() == own.numel() * getSize());
    return enqueue(options.asyncOp,
                   [this, own = host_view(own), whole = host_view(whole), op = options.reduceOp] {
                     const at::Tensor copy = whole.clone();
                     run([&](comm::Communicator& host) {
                       return host.reduce_scatter(copy, op_of(op), "a fake reduction");
                     });
                     own.copy_(slice(copy, getRank()));
                   });
  }

  Work alltoall_base(at::Tensor& to, at::Tensor& from, std::vector<int64_t>& to_sizes,
                     std::vector<int64_t>& from_sizes,
                     const c10d::AllToAllOptions& options) override {
    TORCH_CHECK(to_sizes.empty() && from_sizes.empty() && to.numel() == from.numel());
    return enqueue(options.asyncOp, [this, to = host_view(to), from = host_view(from)] {
      const at::Tensor all = at::empty({getSize() * from.numel()}, from.options());
      slice(all, getRank()).copy_(from);
      run([&](comm::Communicator& host) { return host.all_gather(all, "a fake exchange"); });
      for (int rank = 0; rank < getSize(); ++rank) {
        slice(to, rank).copy_(slice(slice(all, rank), getRank()));
      }
    });
  }

  Work allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    return enqueue(options.asyncOp,
                   [this, tensor = host_view(tensors.at(0)), op = options.reduceOp] {
                     run([&](comm::Communicator& host) {
                       return host.all_reduce(tensor, op_of(op), "a fake reduction");
                     });
                   });
  }

  Work broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    const int root = static_cast<int>(options.rootRank);
    return enqueue(options.asyncOp, [this, tensor = host_view(tensors.at(0)), root] {
      run([&](comm::Communicator& host) { return host.broadcast(tensor, root, "a fake one"); });
    });
  }

  Work reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& options) override {
    const int root = static_cast<int>(options.rootRank);
    return enqueue(options.asyncOp,
                   [this, tensor = host_view(tensors.at(0)), op = options.reduceOp, root] {
                     run([&](comm::Communicator& host) {
                       return host.reduce(tensor, op_of(op), root, "a fake reduction");
                     });
                   });
  }

  // own: unused at the root, whose slice is in place.
  Work gather(std::vector<std::vector<at::Tensor>>& to, std::vector<at::Tensor>& own,
              const c10d::GatherOptions& options) override {
    const int root = static_cast<int>(options.rootRank);
    TORCH_CHECK((getRank() == root) == !to.empty());
    return enqueue(
        options.asyncOp, [this, views = host_views(to), own = host_view(own.at(0)), root] {
          const at::Tensor all = joined(views, own);
          run([&](comm::Communicator& host) { return host.gather(all, root, "a fake gather"); });
          for (size_t rank = 0; rank < views.size(); ++rank) {
            views[rank].copy_(slice(all, static_cast<int>(rank)));
          }
        });
  }

  Work scatter(std::vector<at::Tensor>& own, std::vector<std::vector<at::Tensor>>& from,
               const c10d::ScatterOptions& options) override {
    const int root = static_cast<int>(options.rootRank);
    TORCH_CHECK((getRank() == root) == !from.empty());
    return enqueue(
        options.asyncOp, [this, views = host_views(from), own = host_view(own.at(0)), root] {
          const at::Tensor all = joined(views, own);
          run([&](comm::Communicator& host) { return host.scatter(all, root, "a fake scatter"); });
        });
  }

  Work send(std::vector<at::Tensor>& tensors, int to, int) override {
    return enqueue(/*async=*/true, [this, tensor = host_view(tensors.at(0)), to] {
      run([&](comm::Communicator& host) { return host.send(tensor, to, "a fake one"); });
    });
  }

  Work recv(std::vector<at::Tensor>& tensors, int from, int) override {
    return enqueue(/*async=*/true, [this, tensor = host_view(tensors.at(0)), from] {
      run([&](comm::Communicator& host) { return host.recv(tensor, from, "a fake one"); });
    });
  }

 private:
  struct FakeWork final : c10d::Work {
    explicit FakeWork(c10::Device device, device::Event end)
        : device_(device), end_(std::move(end)) {}
    bool wait(std::chrono::milliseconds) override {
      device::Stream::current(device_).wait(end_);
      return true;
    }
    const c10::Device device_;
    const device::Event end_;
  };

  Work enqueue(bool async, std::function<void()> task) {
    if (!async && streams_ == Streams::kAsNccl) {
      fake_stream(current_fake_stream(device_.index())).enqueue("a collective", std::move(task));
      return {};
    }
    ++hops_;
    const device::Event begun = device::Stream::current(device_).record();
    const c10::StreamGuard guard(stream_);
    device::Stream::current(device_).wait(begun);
    count_launch("a collective");
    fake_stream(stream_).enqueue("a collective", std::move(task));
    return c10::make_intrusive<FakeWork>(device_, device::Stream::current(device_).record());
  }

  // On the stream's thread. Without a peer it does not end, as on a device, until it is aborted.
  template <typename Start>
  void run(const Start& start) {
    comm::Pending pending;
    {
      const std::lock_guard lock(mutex_);
      if (!host_) return;
      pending = start(*host_);
    }
    try {
      pending.wait();
    } catch (const std::exception&) {
      std::unique_lock lock(mutex_);
      aborted_.wait(lock, [this] { return !host_; });
    }
  }

  static comm::ReduceOp op_of(const c10d::ReduceOp& op) {
    if (op == c10d::ReduceOp::MAX) return comm::ReduceOp::kMax;
    if (op == c10d::ReduceOp::MIN) return comm::ReduceOp::kMin;
    return op == c10d::ReduceOp::AVG ? comm::ReduceOp::kMean : comm::ReduceOp::kSum;
  }
  static std::vector<at::Tensor> host_views(const std::vector<std::vector<at::Tensor>>& lists) {
    std::vector<at::Tensor> views;
    for (const auto& list : lists) {
      for (const at::Tensor& tensor : list) views.push_back(host_view(tensor));
    }
    return views;
  }
  // The root's whole, or the slice of another.
  static at::Tensor joined(const std::vector<at::Tensor>& slices, const at::Tensor& own) {
    return slices.empty() ? own : at::cat(slices);
  }
  at::Tensor slice(const at::Tensor& whole, int rank) const {
    const int64_t numel = whole.numel() / getSize();
    return whole.narrow(0, rank * numel, numel);
  }

  const c10::Device device_;
  const Streams streams_;
  const c10::Stream stream_;
  std::atomic<int64_t> hops_{0};
  std::mutex mutex_;
  std::condition_variable aborted_;
  std::unique_ptr<comm::Communicator> host_;  // guarded by mutex_
};

}  // namespace zeropage::testing
