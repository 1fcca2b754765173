#include "comm/devices/device_communicator.h"

#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include "comm/detail/call.h"
#include "comm/devices/device_reduction.h"
#include "comm/devices/device_watch.h"
#include "memory/check.h"
#include "memory/exact.h"
#include "memory/ledger.h"

namespace zeropage::comm {
namespace {

using detail::bytes_of;
using detail::Call;
using detail::DeviceWatch;
using detail::Operation;
using detail::Slices;
using memory::Event;
using memory::Stream;
using memory::StreamScope;
using Work = c10::intrusive_ptr<c10d::Work>;

// What ranks have enqueued when they end well needs this long at most.
constexpr std::chrono::seconds kLastOperations{5};

// Collectives run on the stream that is current: ours. A backend whose own stream takes them, as NCCL's
// takes the messages of pairs, returns what the current stream then waits for.
constexpr bool kOnOwnStream = false;

void let_stream_wait(const Work& work) {
  if (work) work->wait();
}

c10d::ReduceOp::RedOpType c10d_op(ReduceOp op) {
  if (op == ReduceOp::kMax) return c10d::ReduceOp::MAX;
  return op == ReduceOp::kMin ? c10d::ReduceOp::MIN : c10d::ReduceOp::SUM;
}

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
                   gather(whole);
                 });
  }

  Pending start_reduce_scatter(const at::Tensor& whole, ReduceOp op, std::string what) override {
    if (whole.is_cpu()) return host_->reduce_scatter(whole, op, what);
    return start(calls_.collective(Operation::kReduceScatter, whole, std::move(what)), whole,
                 [&](const Call& call) {
                   sent_.add(call.operation, bytes_for_others(call.bytes));
                   reduce_own_slice(whole, op);
                 });
  }

  Pending start_all_reduce(const at::Tensor& tensor, ReduceOp op, std::string what) override {
    if (tensor.is_cpu()) return host_->all_reduce(tensor, op, what);
    return start(calls_.collective(Operation::kAllReduce, tensor, std::move(what)), tensor,
                 [&](const Call& call) {
                   sent_.add(call.operation, 2 * bytes_for_others(call.bytes));
                   if (options_.order == ReductionOrder::kFixed) {
                     reduce_slices_and_gather(tensor, op);
                   } else {
                     std::vector<at::Tensor> tensors = {tensor};
                     let_stream_wait(options_.backend->allreduce(
                         tensors, {.reduceOp = fast_op(tensor, op), .asyncOp = kOnOwnStream}));
                     divide_if_mean(tensor, op);
                   }
                 });
  }

  Pending start_broadcast(const at::Tensor& tensor, int root, std::string what) override {
    if (tensor.is_cpu()) return host_->broadcast(tensor, root, what);
    return start(calls_.collective(Operation::kBroadcast, tensor, std::move(what)), tensor,
                 [&](const Call& call) {
                   if ((rank() + 1) % size() != root) sent_.add(call.operation, call.bytes);
                   std::vector<at::Tensor> bytes = {tensor.view(at::kByte)};
                   let_stream_wait(options_.backend->broadcast(
                       bytes, {.rootRank = root, .asyncOp = kOnOwnStream}));
                 });
  }

  Pending start_reduce(const at::Tensor& tensor, ReduceOp op, int root, std::string what) override {
    if (tensor.is_cpu()) return host_->reduce(tensor, op, root, what);
    return start(
        calls_.collective(Operation::kReduce, tensor, std::move(what)), tensor,
        [&](const Call& call) {
          if (options_.order == ReductionOrder::kFixed) {
            sent_.add(call.operation, 2 * bytes_for_others(call.bytes));
            reduce_slices_and_gather(tensor, op, root);
            return;
          }
          if (rank() != root) sent_.add(call.operation, call.bytes);
          std::vector<at::Tensor> tensors = {tensor};
          let_stream_wait(options_.backend->reduce(
              tensors,
              {.reduceOp = fast_op(tensor, op), .rootRank = root, .asyncOp = kOnOwnStream}));
          if (rank() == root) divide_if_mean(tensor, op);
        });
  }

  Pending start_gather(const at::Tensor& tensor, int root, std::string what) override {
    if (tensor.is_cpu()) return host_->gather(tensor, root, what);
    return start(
        rooted(Operation::kGather, tensor, root, std::move(what)), tensor, [&](const Call& call) {
          if (rank() != root) sent_.add(call.operation, call.bytes / size());
          std::vector<std::vector<at::Tensor>> arriving;
          std::vector<at::Tensor> own = {tensor.view(at::kByte)};
          if (rank() == root) {
            arriving = {slices_of(tensor)};
            own = {arriving.front()[static_cast<size_t>(root)]};
          }
          let_stream_wait(
              options_.backend->gather(arriving, own, {.rootRank = root, .asyncOp = kOnOwnStream}));
        });
  }

  Pending start_scatter(const at::Tensor& tensor, int root, std::string what) override {
    if (tensor.is_cpu()) return host_->scatter(tensor, root, what);
    return start(
        rooted(Operation::kScatter, tensor, root, std::move(what)), tensor, [&](const Call& call) {
          if (rank() == root) sent_.add(call.operation, bytes_for_others(call.bytes));
          std::vector<std::vector<at::Tensor>> leaving;
          std::vector<at::Tensor> own = {tensor.view(at::kByte)};
          if (rank() == root) {
            leaving = {slices_of(tensor)};
            own = {leaving.front()[static_cast<size_t>(root)]};
          }
          let_stream_wait(
              options_.backend->scatter(own, leaving, {.rootRank = root, .asyncOp = kOnOwnStream}));
        });
  }

  Pending start_all_to_all(const at::Tensor& given, const at::Tensor& received,
                           std::string what) override {
    if (given.is_cpu()) return host_->all_to_all(given, received, what);
    return start(calls_.collective(Operation::kAllToAll, given, std::move(what)), given,
                 [&](const Call& call) {
                   sent_.add(call.operation, bytes_for_others(call.bytes));
                   exchange(given, received);
                 },
                 {received});
  }

  Pending start_barrier(std::string what) override { return host_->barrier(what); }

  Pending start_send(const at::Tensor& tensor, int to_rank, std::string what) override {
    if (tensor.is_cpu()) return host_->send(tensor, to_rank, what);
    return start(calls_.send(tensor, to_rank, std::move(what)), tensor, [&](const Call& call) {
      sent_.add(call.operation, call.bytes);
      std::vector<at::Tensor> bytes = {tensor.view(at::kByte)};
      let_stream_wait(options_.backend->send(bytes, to_rank, /*tag=*/0));
    });
  }

  Pending start_recv(const at::Tensor& tensor, int from_rank, std::string what) override {
    if (tensor.is_cpu()) return host_->recv(tensor, from_rank, what);
    return start(calls_.recv(tensor, from_rank, std::move(what)), tensor, [&](const Call&) {
      std::vector<at::Tensor> bytes = {tensor.view(at::kByte)};
      let_stream_wait(options_.backend->recv(bytes, from_rank, /*tag=*/0));
    });
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

  // ---- on our stream ----

  void gather(const at::Tensor& whole) const {
    at::Tensor bytes = whole.view(at::kByte);
    at::Tensor own = Slices::even(bytes.numel(), size()).of(bytes, rank());
    let_stream_wait(options_.backend->_allgather_base(bytes, own, {.asyncOp = kOnOwnStream}));
  }

  void exchange(const at::Tensor& given, const at::Tensor& received) const {
    at::Tensor arriving = received.view(at::kByte);
    at::Tensor leaving = given.view(at::kByte);
    std::vector<int64_t> even;
    let_stream_wait(
        options_.backend->alltoall_base(arriving, leaving, even, even, {.asyncOp = kOnOwnStream}));
  }

  // By rank, in bytes.
  std::vector<at::Tensor> slices_of(const at::Tensor& whole) const {
    const at::Tensor bytes = whole.view(at::kByte);
    const Slices slices = Slices::even(bytes.numel(), size());
    std::vector<at::Tensor> by_rank;
    for (int rank = 0; rank < size(); ++rank) by_rank.push_back(slices.of(bytes, rank));
    return by_rank;
  }

  void reduce_own_slice(const at::Tensor& whole, ReduceOp op) {
    at::Tensor own = Slices::even(whole.numel(), size()).of(whole, rank());
    at::Tensor given = whole;
    if (options_.order == ReductionOrder::kFixed) {
      at::Tensor contributions = staging(staging_, whole.numel(), whole.scalar_type());
      exchange(whole, contributions);
      detail::reduce_in_rank_order(contributions, size(), own, op, divisor());
    } else {
      let_stream_wait(options_.backend->_reduce_scatter_base(
          own, given, {.reduceOp = fast_op(whole, op), .asyncOp = kOnOwnStream}));
      divide_if_mean(own, op);
    }
  }

  // root: the one rank whose tensor changes; -1: all do.
  void reduce_slices_and_gather(const at::Tensor& tensor, ReduceOp op, int root = -1) {
    const int64_t padded_numel = memory::round_up<int64_t>(tensor.numel(), size());
    if (padded_numel == tensor.numel() && (root < 0 || root == rank())) {
      reduce_own_slice(tensor, op);
      gather(tensor);
      return;
    }
    const at::Tensor padded = staging(padded_, padded_numel, tensor.scalar_type());
    const at::Tensor filled = padded.narrow(0, 0, tensor.numel());
    filled.copy_(tensor);
    reduce_own_slice(padded, op);
    gather(padded);
    if (root < 0 || root == rank()) tensor.copy_(filled);
  }

  // fp16's sums overflow where its means do not.
  c10d::ReduceOp fast_op(const at::Tensor& tensor, ReduceOp op) const {
    if (op == ReduceOp::kMean && divides_before(tensor)) return c10d::ReduceOp::AVG;
    return c10d_op(op);
  }
  static bool divides_before(const at::Tensor& tensor) { return tensor.scalar_type() == at::kHalf; }
  void divide_if_mean(const at::Tensor& sum, ReduceOp op) {
    if (op == ReduceOp::kMean && !divides_before(sum)) divisor().divide(sum);
  }

  // [numel] in `buffer`, which grows and is used in our stream's order.
  at::Tensor staging(at::Tensor& buffer, int64_t numel, at::ScalarType dtype) const {
    const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
    if (!buffer.defined() || buffer.numel() < bytes) {
      const memory::KindScope kind(memory::Kind::kStaging);
      buffer = at::Tensor();
      buffer = at::empty({bytes}, at::TensorOptions(device()).dtype(at::kByte));
    }
    return buffer.narrow(0, 0, bytes).view(dtype);
  }

  const detail::Divisor& divisor() {
    if (!divisor_) divisor_.emplace(size(), device());
    return *divisor_;
  }

  // Constant after construction.
  const DeviceCommunicatorOptions options_;
  const Stream stream_ = Stream::another(options_.device);

  // Owned by the calling thread. Tensors are used in the order of stream_.
  detail::CallNumbers calls_{size(), options_.names};
  detail::TrafficCounter sent_;
  at::Tensor staging_;
  at::Tensor padded_;
  std::optional<detail::Divisor> divisor_;

  const std::unique_ptr<Communicator> host_;
  const std::shared_ptr<DeviceWatch> watch_;  // shared with what is in flight
};

}  // namespace

std::unique_ptr<Communicator> make_device_communicator(std::unique_ptr<Communicator> host,
                                                       DeviceCommunicatorOptions options) {
  return std::make_unique<DeviceCommunicator>(std::move(host), std::move(options));
}

}  // namespace zeropage::comm
