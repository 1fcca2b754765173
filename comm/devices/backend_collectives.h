// The operations of zeropage/communicator.h through a c10d backend that works on streams.
//
// Everything is enqueued to the calling thread's current stream, on which the backend is asked to run it; a
// backend with a stream of its own works too, by an event there and one back. In what order sums are made,
// and what that costs: comm/devices/device_communicator.h.
//
// Lifetime: its buffers must be used in one stream's order. Threads: one at a time.
// Throws: what the backend throws.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "comm/devices/device_reduction.h"
#include "zeropage/communicator.h"

namespace zeropage::comm::detail {

class BackendCollectives {
 public:
  BackendCollectives(c10::intrusive_ptr<c10d::Backend> backend, c10::Device device,
                     ReductionOrder order)
      : backend_(std::move(backend)), device_(device), order_(order) {}

  void all_gather(const at::Tensor& whole) const;
  void reduce_scatter(const at::Tensor& whole, ReduceOp op);
  void all_reduce(const at::Tensor& tensor, ReduceOp op);
  void broadcast(const at::Tensor& tensor, int root) const;
  void reduce(const at::Tensor& tensor, ReduceOp op, int root);
  // tensor: the root's whole, or the slice of another.
  void gather(const at::Tensor& tensor, int root) const;
  void scatter(const at::Tensor& tensor, int root) const;
  void all_to_all(const at::Tensor& given, const at::Tensor& received) const;
  void send(const at::Tensor& tensor, int to_rank) const;
  void recv(const at::Tensor& tensor, int from_rank) const;

 private:
  int rank() const { return backend_->getRank(); }
  int size() const { return backend_->getSize(); }
  // root: the one rank whose tensor changes; -1: all do.
  void reduce_slices_and_gather(const at::Tensor& tensor, ReduceOp op, int root);
  std::vector<at::Tensor> slices_of(const at::Tensor& whole) const;
  void divide_if_mean(const at::Tensor& sum, ReduceOp op);
  // [numel] in `buffer`, which grows and is used in our stream's order.
  at::Tensor staging(at::Tensor& buffer, int64_t numel, at::ScalarType dtype) const;
  const Divisor& divisor();

  // Constant after construction.
  const c10::intrusive_ptr<c10d::Backend> backend_;
  const c10::Device device_;
  const ReductionOrder order_;

  at::Tensor staging_;
  at::Tensor padded_;
  std::optional<Divisor> divisor_;
};

}  // namespace zeropage::comm::detail
