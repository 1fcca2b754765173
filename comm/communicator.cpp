#include "comm/communicator.h"

#include <cstdlib>

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

// Of what only the root has whole.
void Communicator::check_part(const at::Tensor& tensor, int root, const char* operation,
                              std::string_view what) const {
  check_peer(root, operation, what);
  if (rank_ == root) {
    check_slices(tensor, operation, what);
  } else {
    check(tensor, operation, what);
  }
}

void Communicator::check_peer(int peer, const char* operation, std::string_view what) const {
  ZP_CHECK(peer >= 0 && peer < size_, operation, " of ", what, ": there is no rank ", peer,
           " in a world of ", size_, where_);
}

// What an operation is of, as errors and the other ranks name it.
std::string Communicator::named(std::string_view what) const {
  return std::string(what) + where_;
}

Pending Communicator::all_gather(const at::Tensor& whole, std::string_view what) {
  check_slices(whole, "all_gather", what);
  return start_all_gather(whole, named(what));
}

Pending Communicator::reduce_scatter(const at::Tensor& whole, ReduceOp op, std::string_view what) {
  check_slices(whole, "reduce_scatter", what);
  return start_reduce_scatter(whole, op, named(what));
}

Pending Communicator::all_reduce(const at::Tensor& tensor, ReduceOp op, std::string_view what) {
  check(tensor, "all_reduce", what);
  return start_all_reduce(tensor, op, named(what));
}

Pending Communicator::broadcast(const at::Tensor& tensor, int root, std::string_view what) {
  check(tensor, "broadcast", what);
  check_peer(root, "broadcast", what);
  return start_broadcast(tensor, root, named(what));
}

Pending Communicator::reduce(const at::Tensor& tensor, ReduceOp op, int root,
                             std::string_view what) {
  check(tensor, "reduce", what);
  check_peer(root, "reduce", what);
  return start_reduce(tensor, op, root, named(what));
}

Pending Communicator::gather(const at::Tensor& tensor, int root, std::string_view what) {
  check_part(tensor, root, "gather", what);
  return start_gather(tensor, root, named(what));
}

Pending Communicator::scatter(const at::Tensor& tensor, int root, std::string_view what) {
  check_part(tensor, root, "scatter", what);
  return start_scatter(tensor, root, named(what));
}

Pending Communicator::all_to_all(const at::Tensor& given, const at::Tensor& received,
                                 std::string_view what) {
  check_slices(given, "all_to_all", what);
  check_slices(received, "all_to_all", what);
  ZP_CHECK(given.numel() == received.numel() && given.scalar_type() == received.scalar_type() &&
               given.device() == received.device(),
           "all_to_all of ", what, ": gives ", given.numel(), " elements of ", given.scalar_type(),
           " on ", given.device(), ", but receives ", received.numel(), " of ",
           received.scalar_type(), " on ", received.device(), "; make them alike");
  const auto distance = given.storage_offset() - received.storage_offset();
  ZP_CHECK(!given.is_alias_of(received) || std::abs(distance) >= given.numel(), "all_to_all of ",
           what, ": what is given and what is received overlap; receive into another buffer");
  return start_all_to_all(given, received, named(what));
}

Pending Communicator::barrier(std::string_view what) {
  return start_barrier(named(what));
}

Pending Communicator::send(const at::Tensor& tensor, int to_rank, std::string_view what) {
  check(tensor, "send", what);
  check_peer(to_rank, "send", what);
  ZP_CHECK(to_rank != rank_, "send of ", what, ": rank ", rank_, " cannot send to itself");
  return start_send(tensor, to_rank, named(what));
}

Pending Communicator::recv(const at::Tensor& tensor, int from_rank, std::string_view what) {
  check(tensor, "recv", what);
  check_peer(from_rank, "recv", what);
  ZP_CHECK(from_rank != rank_, "recv of ", what, ": rank ", rank_, " cannot receive from itself");
  return start_recv(tensor, from_rank, named(what));
}

Pending Communicator::start_reduce(const at::Tensor& /*tensor*/, ReduceOp /*op*/, int /*root*/,
                                   std::string what) {
  refuse("reduce", what);
}
Pending Communicator::start_gather(const at::Tensor& /*tensor*/, int /*root*/, std::string what) {
  refuse("gather", what);
}
Pending Communicator::start_scatter(const at::Tensor& /*tensor*/, int /*root*/, std::string what) {
  refuse("scatter", what);
}
Pending Communicator::start_all_to_all(const at::Tensor& /*given*/, const at::Tensor& /*received*/,
                                       std::string what) {
  refuse("all_to_all", what);
}

void Communicator::refuse(const char* operation, std::string_view what) const {
  ZP_THROW(operation, " of ", what, ": this ", transport(),
           " communicator passes on what it is asked for, but not this operation; override start_",
           operation, "() in it");
}

at::Tensor Communicator::buffer(int64_t numel, at::ScalarType dtype) const {
  return at::empty({numel}, at::TensorOptions().dtype(dtype).device(device()));
}

}  // namespace zeropage::comm
