#include "zeropage/communicator.h"

#include <cstdlib>

#include <ATen/ops/empty.h>

#include "comm/watch/announced_call.h"
#include "zeropage/check.h"

namespace zeropage::comm {

namespace {

// What a rank asks for, and whether it can have it.
class Request {
 public:
  // where: these ranks meet.
  Request(const Communicator& communicator, const char* operation, std::string_view what,
          const std::string& where)
      : communicator_(communicator),
        operation_(operation),
        what_(std::string(what) + where),
        announced_(operation_, what_) {}

  // What the operation is of, as errors and the other ranks name it.
  const std::string& what() const { return what_; }

  void check(const at::Tensor& tensor) {
    ZP_CHECK(tensor.defined() && tensor.dim() == 1 && tensor.is_contiguous(), operation_, " of ",
             what_, ": expected a contiguous 1-D tensor, got ",
             tensor.defined() ? c10::str("sizes ", tensor.sizes(), ", strides ", tensor.strides())
                              : std::string("an undefined one"),
             "; pass a flat buffer");
    ZP_CHECK(communicator_.moves(tensor.device()), operation_, " of ", what_, ": the tensor is on ",
             tensor.device(), ", but the ", communicator_.transport(),
             " communicator moves tensors on ", communicator_.device(), "; copy it there first");
    announced_.moves(tensor);
  }

  void check_slices(const at::Tensor& whole) {
    check(whole);
    ZP_CHECK(whole.numel() % communicator_.size() == 0, operation_, " of ", what_, ": ",
             whole.numel(), " elements do not divide into ", communicator_.size(),
             " slices; pad the tensor");
  }

  void check_peer(int peer) const {
    ZP_CHECK(peer >= 0 && peer < communicator_.size(), operation_, " of ", what_,
             ": there is no rank ", peer, " in a world of ", communicator_.size());
  }

  // Checks an operation whose whole tensor only the root has.
  void check_part(const at::Tensor& tensor, int root) {
    check_peer(root);
    if (communicator_.rank() == root) {
      check_slices(tensor);
    } else {
      check(tensor);
    }
  }

  [[noreturn]] void refuse() const {
    ZP_THROW(
        operation_, " of ", what_, ": this ", communicator_.transport(),
        " communicator passes on what it is asked for, but not this operation; override start_",
        operation_, "() in it");
  }

 private:
  const Communicator& communicator_;
  const char* const operation_;
  const std::string what_;
  detail::AnnouncedCall announced_;  // for as long as it is being started
};

}  // namespace

Pending Communicator::all_gather(const at::Tensor& whole, std::string_view what) {
  Request request(*this, "all_gather", what, where_);
  request.check_slices(whole);
  return begun(start_all_gather(whole, request.what()));
}

Pending Communicator::reduce_scatter(const at::Tensor& whole, ReduceOp op, std::string_view what) {
  Request request(*this, "reduce_scatter", what, where_);
  request.check_slices(whole);
  return begun(start_reduce_scatter(whole, op, request.what()));
}

Pending Communicator::all_reduce(const at::Tensor& tensor, ReduceOp op, std::string_view what) {
  Request request(*this, "all_reduce", what, where_);
  request.check(tensor);
  return begun(start_all_reduce(tensor, op, request.what()));
}

Pending Communicator::broadcast(const at::Tensor& tensor, int root, std::string_view what) {
  Request request(*this, "broadcast", what, where_);
  request.check(tensor);
  request.check_peer(root);
  return begun(start_broadcast(tensor, root, request.what()));
}

Pending Communicator::reduce(const at::Tensor& tensor, ReduceOp op, int root,
                             std::string_view what) {
  Request request(*this, "reduce", what, where_);
  request.check(tensor);
  request.check_peer(root);
  return begun(start_reduce(tensor, op, root, request.what()));
}

Pending Communicator::gather(const at::Tensor& tensor, int root, std::string_view what) {
  Request request(*this, "gather", what, where_);
  request.check_part(tensor, root);
  return begun(start_gather(tensor, root, request.what()));
}

Pending Communicator::scatter(const at::Tensor& tensor, int root, std::string_view what) {
  Request request(*this, "scatter", what, where_);
  request.check_part(tensor, root);
  return begun(start_scatter(tensor, root, request.what()));
}

Pending Communicator::all_to_all(const at::Tensor& given, const at::Tensor& received,
                                 std::string_view what) {
  Request request(*this, "all_to_all", what, where_);
  request.check_slices(given);
  request.check_slices(received);
  ZP_CHECK(given.numel() == received.numel() && given.scalar_type() == received.scalar_type() &&
               given.device() == received.device(),
           "all_to_all of ", request.what(), ": gives ", given.numel(), " elements of ",
           given.scalar_type(), " on ", given.device(), ", but receives ", received.numel(), " of ",
           received.scalar_type(), " on ", received.device(), "; make them alike");
  const auto distance = given.storage_offset() - received.storage_offset();
  ZP_CHECK(!given.is_alias_of(received) || std::abs(distance) >= given.numel(), "all_to_all of ",
           request.what(),
           ": what is given and what is received overlap; receive into another buffer");
  return begun(start_all_to_all(given, received, request.what()));
}

Pending Communicator::barrier(std::string_view what) {
  const Request request(*this, "barrier", what, where_);
  return begun(start_barrier(request.what()));
}

Pending Communicator::send(const at::Tensor& tensor, int to_rank, std::string_view what) {
  Request request(*this, "send", what, where_);
  request.check(tensor);
  request.check_peer(to_rank);
  ZP_CHECK(to_rank != rank_, "send of ", request.what(), ": rank ", rank_,
           " cannot send to itself");
  return begun(start_send(tensor, to_rank, request.what()));
}

Pending Communicator::recv(const at::Tensor& tensor, int from_rank, std::string_view what) {
  Request request(*this, "recv", what, where_);
  request.check(tensor);
  request.check_peer(from_rank);
  ZP_CHECK(from_rank != rank_, "recv of ", request.what(), ": rank ", rank_,
           " cannot receive from itself");
  return begun(start_recv(tensor, from_rank, request.what()));
}

Pending Communicator::begun(const Pending& operation) {
  last_ = operation.without_buffers();
  return operation;
}

void Communicator::finish() noexcept {
  try {
    last_.wait();
  } catch (const std::exception&) {
    // Who waited for it was told, and the others are.
  }
}

// `what` has where these ranks meet in it.
Pending Communicator::start_reduce(const at::Tensor& /*tensor*/, ReduceOp /*op*/, int /*root*/,
                                   std::string what) {
  Request(*this, "reduce", what, "").refuse();
}
Pending Communicator::start_gather(const at::Tensor& /*tensor*/, int /*root*/, std::string what) {
  Request(*this, "gather", what, "").refuse();
}
Pending Communicator::start_scatter(const at::Tensor& /*tensor*/, int /*root*/, std::string what) {
  Request(*this, "scatter", what, "").refuse();
}
Pending Communicator::start_all_to_all(const at::Tensor& /*given*/, const at::Tensor& /*received*/,
                                       std::string what) {
  Request(*this, "all_to_all", what, "").refuse();
}

at::Tensor Communicator::buffer(int64_t numel, at::ScalarType dtype) const {
  return at::empty({numel}, at::TensorOptions().dtype(dtype).device(device()));
}

}  // namespace zeropage::comm
