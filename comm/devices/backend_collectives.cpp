#include "comm/devices/backend_collectives.h"

#include <ATen/ops/empty.h>

#include "base/exact.h"
#include "comm/detail/call.h"
#include "zeropage/ledger.h"

namespace zeropage::comm::detail {
namespace {

// Collectives run on the stream that is current: ours. A backend whose own stream takes them, as NCCL's
// takes the messages of pairs, returns what the current stream then waits for.
constexpr bool kOnOwnStream = false;

// fp16's sums overflow where its means do not.
bool divides_before(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf;
}

c10d::ReduceOp fast_op(const at::Tensor& tensor, ReduceOp op) {
  if (op == ReduceOp::kMax) return c10d::ReduceOp::MAX;
  if (op == ReduceOp::kMin) return c10d::ReduceOp::MIN;
  if (op == ReduceOp::kMean && divides_before(tensor)) return c10d::ReduceOp::AVG;
  return c10d::ReduceOp::SUM;
}

// The current stream does.
void let_stream_wait(const c10::intrusive_ptr<c10d::Work>& work) {
  if (work) work->wait();
}

}  // namespace

void BackendCollectives::all_gather(const at::Tensor& whole) const {
  at::Tensor bytes = whole.view(at::kByte);
  at::Tensor own = Slices::even(bytes.numel(), size()).of(bytes, rank());
  let_stream_wait(backend_->_allgather_base(bytes, own, {.asyncOp = kOnOwnStream}));
}

void BackendCollectives::reduce_scatter(const at::Tensor& whole, ReduceOp op) {
  at::Tensor own = Slices::even(whole.numel(), size()).of(whole, rank());
  if (order_ == ReductionOrder::kFixed) {
    at::Tensor contributions = staging(staging_, whole.numel(), whole.scalar_type());
    all_to_all(whole, contributions);
    reduce_in_rank_order(contributions, size(), own, op, divisor());
  } else {
    at::Tensor given = whole;
    let_stream_wait(backend_->_reduce_scatter_base(
        own, given, {.reduceOp = fast_op(whole, op), .asyncOp = kOnOwnStream}));
    divide_if_mean(own, op);
  }
}

void BackendCollectives::all_reduce(const at::Tensor& tensor, ReduceOp op) {
  if (order_ == ReductionOrder::kFast) {
    std::vector<at::Tensor> tensors = {tensor};
    let_stream_wait(
        backend_->allreduce(tensors, {.reduceOp = fast_op(tensor, op), .asyncOp = kOnOwnStream}));
    divide_if_mean(tensor, op);
    return;
  }
  reduce_slices_and_gather(tensor, op, /*root=*/-1);
}

void BackendCollectives::reduce(const at::Tensor& tensor, ReduceOp op, int root) {
  if (order_ == ReductionOrder::kFixed) {
    reduce_slices_and_gather(tensor, op, root);
    return;
  }
  std::vector<at::Tensor> tensors = {tensor};
  let_stream_wait(backend_->reduce(
      tensors, {.reduceOp = fast_op(tensor, op), .rootRank = root, .asyncOp = kOnOwnStream}));
  if (rank() == root) divide_if_mean(tensor, op);
}

void BackendCollectives::reduce_slices_and_gather(const at::Tensor& tensor, ReduceOp op, int root) {
  const bool is_written = root < 0 || root == rank();
  const int64_t padded_numel = base::round_up<int64_t>(tensor.numel(), size());
  if (padded_numel == tensor.numel() && is_written) {
    reduce_scatter(tensor, op);
    all_gather(tensor);
    return;
  }
  const at::Tensor padded = staging(padded_, padded_numel, tensor.scalar_type());
  const at::Tensor filled = padded.narrow(0, 0, tensor.numel());
  filled.copy_(tensor);
  reduce_scatter(padded, op);
  all_gather(padded);
  if (is_written) tensor.copy_(filled);
}

void BackendCollectives::broadcast(const at::Tensor& tensor, int root) const {
  std::vector<at::Tensor> bytes = {tensor.view(at::kByte)};
  let_stream_wait(backend_->broadcast(bytes, {.rootRank = root, .asyncOp = kOnOwnStream}));
}

void BackendCollectives::gather(const at::Tensor& tensor, int root) const {
  std::vector<std::vector<at::Tensor>> arriving;
  std::vector<at::Tensor> own = {tensor.view(at::kByte)};
  if (rank() == root) {
    arriving = {slices_of(tensor)};
    own = {arriving.front()[static_cast<size_t>(root)]};
  }
  let_stream_wait(backend_->gather(arriving, own, {.rootRank = root, .asyncOp = kOnOwnStream}));
}

void BackendCollectives::scatter(const at::Tensor& tensor, int root) const {
  std::vector<std::vector<at::Tensor>> leaving;
  std::vector<at::Tensor> own = {tensor.view(at::kByte)};
  if (rank() == root) {
    leaving = {slices_of(tensor)};
    own = {leaving.front()[static_cast<size_t>(root)]};
  }
  let_stream_wait(backend_->scatter(own, leaving, {.rootRank = root, .asyncOp = kOnOwnStream}));
}

void BackendCollectives::all_to_all(const at::Tensor& given, const at::Tensor& received) const {
  at::Tensor arriving = received.view(at::kByte);
  at::Tensor leaving = given.view(at::kByte);
  std::vector<int64_t> even;
  let_stream_wait(
      backend_->alltoall_base(arriving, leaving, even, even, {.asyncOp = kOnOwnStream}));
}

// By rank, in bytes.
std::vector<at::Tensor> BackendCollectives::slices_of(const at::Tensor& whole) const {
  const at::Tensor bytes = whole.view(at::kByte);
  const Slices slices = Slices::even(bytes.numel(), size());
  std::vector<at::Tensor> by_rank;
  for (int rank = 0; rank < size(); ++rank) by_rank.push_back(slices.of(bytes, rank));
  return by_rank;
}

void BackendCollectives::send(const at::Tensor& tensor, int to_rank) const {
  std::vector<at::Tensor> bytes = {tensor.view(at::kByte)};
  let_stream_wait(backend_->send(bytes, to_rank, /*tag=*/0));
}

void BackendCollectives::recv(const at::Tensor& tensor, int from_rank) const {
  std::vector<at::Tensor> bytes = {tensor.view(at::kByte)};
  let_stream_wait(backend_->recv(bytes, from_rank, /*tag=*/0));
}

void BackendCollectives::divide_if_mean(const at::Tensor& sum, ReduceOp op) {
  if (op == ReduceOp::kMean && !divides_before(sum)) divisor().divide(sum);
}

at::Tensor BackendCollectives::staging(at::Tensor& buffer, int64_t numel,
                                       at::ScalarType dtype) const {
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  if (!buffer.defined() || buffer.numel() < bytes) {
    const memory::KindScope kind(memory::Kind::kStaging);
    buffer = at::Tensor();
    buffer = at::empty({bytes}, at::TensorOptions(device_).dtype(at::kByte));
  }
  return buffer.narrow(0, 0, bytes).view(dtype);
}

const Divisor& BackendCollectives::divisor() {
  if (!divisor_) divisor_.emplace(size(), device_);
  return *divisor_;
}

}  // namespace zeropage::comm::detail
