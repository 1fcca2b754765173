#include "comm/communicator.h"

#include <ATen/ops/empty.h>

#include "memory/check.h"

namespace zeropage::comm {

void Communicator::check(const at::Tensor& tensor, const char* operation,
                         std::string_view what) const {
  ZP_CHECK(tensor.defined() && tensor.dim() == 1 && tensor.is_contiguous(), operation, " of ", what,
           ": expected a contiguous 1-D tensor, got ",
           tensor.defined() ? c10::str("sizes ", tensor.sizes(), ", strides ", tensor.strides())
                            : std::string("an undefined one"),
           "; pass a flat buffer");
  ZP_CHECK(moves(tensor.device()), operation, " of ", what, ": the tensor is on ", tensor.device(),
           ", but the ", transport(), " communicator moves tensors on ", device(),
           "; copy it there first");
}

void Communicator::check_slices(const at::Tensor& whole, const char* operation,
                                std::string_view what) const {
  check(whole, operation, what);
  ZP_CHECK(whole.numel() % size_ == 0, operation, " of ", what, ": ", whole.numel(),
           " elements do not divide into ", size_, " slices; pad the tensor");
}

void Communicator::check_peer(int peer, const char* operation, std::string_view what) const {
  ZP_CHECK(peer >= 0 && peer < size_, operation, " of ", what, ": there is no rank ", peer,
           " in a world of ", size_);
}

Pending Communicator::all_gather(const at::Tensor& whole, std::string_view what) {
  check_slices(whole, "all_gather", what);
  return start_all_gather(whole, std::string(what));
}

Pending Communicator::reduce_scatter(const at::Tensor& whole, ReduceOp op, std::string_view what) {
  check_slices(whole, "reduce_scatter", what);
  return start_reduce_scatter(whole, op, std::string(what));
}

Pending Communicator::all_reduce(const at::Tensor& tensor, ReduceOp op, std::string_view what) {
  check(tensor, "all_reduce", what);
  return start_all_reduce(tensor, op, std::string(what));
}

Pending Communicator::broadcast(const at::Tensor& tensor, int root, std::string_view what) {
  check(tensor, "broadcast", what);
  check_peer(root, "broadcast", what);
  return start_broadcast(tensor, root, std::string(what));
}

Pending Communicator::barrier(std::string_view what) {
  return start_barrier(std::string(what));
}

Pending Communicator::send(const at::Tensor& tensor, int to_rank, std::string_view what) {
  check(tensor, "send", what);
  check_peer(to_rank, "send", what);
  ZP_CHECK(to_rank != rank_, "send of ", what, ": rank ", rank_, " cannot send to itself");
  return start_send(tensor, to_rank, std::string(what));
}

Pending Communicator::recv(const at::Tensor& tensor, int from_rank, std::string_view what) {
  check(tensor, "recv", what);
  check_peer(from_rank, "recv", what);
  ZP_CHECK(from_rank != rank_, "recv of ", what, ": rank ", rank_, " cannot receive from itself");
  return start_recv(tensor, from_rank, std::string(what));
}

at::Tensor Communicator::buffer(int64_t numel, at::ScalarType dtype) const {
  return at::empty({numel}, at::TensorOptions().dtype(dtype).device(device()));
}

}  // namespace zeropage::comm
