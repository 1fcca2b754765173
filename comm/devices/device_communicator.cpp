#include "comm/devices/device_communicator.h"

#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>

#include "comm/detail/call.h"
#include "comm/devices/backend_collectives.h"
#include "comm/devices/device_watch.h"
#include "device/pending_on_device.h"
#include "zeropage/check.h"

namespace zeropage::comm {
namespace {

using detail::bytes_of;
using detail::Call;
using detail::DeviceWatch;
using detail::Operation;
using device::Event;
using device::Stream;
using device::StreamScope;

// What ranks have enqueued when they end well needs this long at most.
constexpr std::chrono::seconds kLastOperations{5};

class DeviceCommunicator final : public Communicator {
 public:
  DeviceCommunicator(std::unique_ptr<Communicator> host, DeviceCommunicatorOptions options)
      : Communicator(host->rank(), host->size()),
        options_(std::move(options)),
        host_(std::move(host)),
        watch_(std::make_shared<DeviceWatch>(DeviceWatch::Options{
            .watch = host_->watch(),
            .lost_ranks = [this] { return options_.names.of(host_->lost_ranks()); },
            .abort = [this] { options_.backend->abort(); }})) {}

  ~DeviceCommunicator() override {
    const bool ended_well = watch_->is_idle(kLastOperations) && host_->lost_ranks().empty();
    watch_->stop();
    try {
      if (ended_well) {
        options_.backend->shutdown();
      } else {
        options_.backend->abort();
      }
    } catch (const std::exception& error) {
      TORCH_WARN(memory::owner_prefix(), "closing ", options_.transport, ": ",
                 memory::message_of(error));
    }
  }

  c10::Device device() const override { return options_.device; }
  bool moves(c10::Device there) const override { return there == device() || there.is_cpu(); }
  std::string_view transport() const override { return options_.transport; }
  bool has_fixed_order() const override {
    return size() == 1 || options_.order == ReductionOrder::kFixed;
  }
  std::vector<int> lost_ranks() override { return host_->lost_ranks(); }

 private:
  Pending start_all_gather(const at::Tensor& whole, std::string what) override {
    if (whole.is_cpu()) return host_->all_gather(whole, what);
    return start(calls_.collective(Operation::kAllGather, whole, std::move(what)), whole,
                 [&](const Call& call) {
                   sent_.add(call.operation, bytes_for_others(call.bytes));
                   collectives_.all_gather(whole);
                 });
  }

  Pending start_reduce_scatter(const at::Tensor& whole, ReduceOp op, std::string what) override {
    if (whole.is_cpu()) return host_->reduce_scatter(whole, op, what);
    return start(calls_.collective(Operation::kReduceScatter, whole, std::move(what)), whole,
                 [&](const Call& call) {
                   sent_.add(call.operation, bytes_for_others(call.bytes));
                   collectives_.reduce_scatter(whole, op);
                 });
  }

  Pending start_all_reduce(const at::Tensor& tensor, ReduceOp op, std::string what) override {
    if (tensor.is_cpu()) return host_->all_reduce(tensor, op, what);
    return start(calls_.collective(Operation::kAllReduce, tensor, std::move(what)), tensor,
                 [&](const Call& call) {
                   sent_.add(call.operation, 2 * bytes_for_others(call.bytes));
                   collectives_.all_reduce(tensor, op);
                 });
  }

  Pending start_broadcast(const at::Tensor& tensor, int root, std::string what) override {
    if (tensor.is_cpu()) return host_->broadcast(tensor, root, what);
    return start(calls_.collective(Operation::kBroadcast, tensor, std::move(what)), tensor,
                 [&](const Call& call) {
                   if ((rank() + 1) % size() != root) sent_.add(call.operation, call.bytes);
                   collectives_.broadcast(tensor, root);
                 });
  }

  Pending start_reduce(const at::Tensor& tensor, ReduceOp op, int root, std::string what) override {
    if (tensor.is_cpu()) return host_->reduce(tensor, op, root, what);
    return start(calls_.collective(Operation::kReduce, tensor, std::move(what)), tensor,
                 [&](const Call& call) {
                   if (options_.order == ReductionOrder::kFixed) {
                     sent_.add(call.operation, 2 * bytes_for_others(call.bytes));
                   } else if (rank() != root) {
                     sent_.add(call.operation, call.bytes);
                   }
                   collectives_.reduce(tensor, op, root);
                 });
  }

  Pending start_gather(const at::Tensor& tensor, int root, std::string what) override {
    if (tensor.is_cpu()) return host_->gather(tensor, root, what);
    return start(rooted(Operation::kGather, tensor, root, std::move(what)), tensor,
                 [&](const Call& call) {
                   if (rank() != root) sent_.add(call.operation, call.bytes / size());
                   collectives_.gather(tensor, root);
                 });
  }

  Pending start_scatter(const at::Tensor& tensor, int root, std::string what) override {
    if (tensor.is_cpu()) return host_->scatter(tensor, root, what);
    return start(rooted(Operation::kScatter, tensor, root, std::move(what)), tensor,
                 [&](const Call& call) {
                   if (rank() == root) sent_.add(call.operation, bytes_for_others(call.bytes));
                   collectives_.scatter(tensor, root);
                 });
  }

  Pending start_all_to_all(const at::Tensor& given, const at::Tensor& received,
                           std::string what) override {
    if (given.is_cpu()) return host_->all_to_all(given, received, what);
    return start(calls_.collective(Operation::kAllToAll, given, std::move(what)), given,
                 [&](const Call& call) {
                   sent_.add(call.operation, bytes_for_others(call.bytes));
                   collectives_.all_to_all(given, received);
                 },
                 {received});
  }

  Pending start_barrier(std::string what) override { return host_->barrier(what); }

  Pending start_send(const at::Tensor& tensor, int to_rank, std::string what) override {
    if (tensor.is_cpu()) return host_->send(tensor, to_rank, what);
    return start(calls_.send(tensor, to_rank, std::move(what)), tensor, [&](const Call& call) {
      sent_.add(call.operation, call.bytes);
      collectives_.send(tensor, to_rank);
    });
  }

  Pending start_recv(const at::Tensor& tensor, int from_rank, std::string what) override {
    if (tensor.is_cpu()) return host_->recv(tensor, from_rank, what);
    return start(calls_.recv(tensor, from_rank, std::move(what)), tensor,
                 [&](const Call&) { collectives_.recv(tensor, from_rank); });
  }

  WireTraffic sent() const override {
    WireTraffic total = sent_.total();
    const WireTraffic of_host = host_->wire_traffic();
    const auto add = [&](Traffic WireTraffic::*part) {
      (total.*part).bytes += (of_host.*part).bytes;
      (total.*part).messages += (of_host.*part).messages;
    };
    for (const auto part :
         {&WireTraffic::all_gather, &WireTraffic::reduce_scatter, &WireTraffic::all_reduce,
          &WireTraffic::broadcast, &WireTraffic::pair, &WireTraffic::barrier, &WireTraffic::reduce,
          &WireTraffic::gather, &WireTraffic::scatter, &WireTraffic::all_to_all}) {
      add(part);
    }
    return total;
  }

  // tensor: the root's whole, or the slice of another.
  Call rooted(Operation operation, const at::Tensor& tensor, int root, std::string what) {
    return calls_.collective(operation, bytes_of(tensor) * (rank() == root ? 1 : size()),
                             std::move(what));
  }

  // enqueue(call): with our stream as the current one. more: what else it uses.
  template <typename Enqueue>
  Pending start(const Call& call, const at::Tensor& tensor, const Enqueue& enqueue,
                std::vector<at::Tensor> more = {}) {
    more.push_back(tensor);
    watch_->check();
    const Event begun = Stream::current(device()).record();
    stream_.wait(begun);
    if (tensor.numel() > 0) {
      // Writes bytes as a communicator on the host does: autograd and its counters see nothing.
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      const StreamScope scope(stream_);
      try {
        enqueue(call);
      } catch (const std::exception& error) {
        watch_->fail(call, memory::message_of(error));
      }
    }
    const Event end = stream_.record();
    watch_->add(call, begun, end);
    return {{.device = device(), .end = end, .check = [watch = watch_] { watch->check(); }},
            std::move(more)};
  }

  int64_t bytes_for_others(int64_t bytes) const { return bytes / size() * (size() - 1); }

  // Constant after construction.
  const DeviceCommunicatorOptions options_;
  const Stream stream_ = Stream::another(options_.device);

  // Owned by the calling thread. Tensors are used in the order of stream_.
  detail::CallNumbers calls_{size(), options_.names};
  detail::TrafficCounter sent_;
  detail::BackendCollectives collectives_{options_.backend, options_.device, options_.order};

  const std::unique_ptr<Communicator> host_;
  const std::shared_ptr<DeviceWatch> watch_;  // shared with what is in flight
};

}  // namespace

std::unique_ptr<Communicator> make_device_communicator(std::unique_ptr<Communicator> host,
                                                       DeviceCommunicatorOptions options) {
  return std::make_unique<DeviceCommunicator>(std::move(host), std::move(options));
}

}  // namespace zeropage::comm
