// Collectives between the ranks of a world.
//
// Every rank calls the same operations in the same order with the same sizes. An operation starts
// at once and runs beside the caller; the Pending it returns ends or throws. Operations of one
// communicator run one after the other, in the order of the calls.
//
// Bits: a reduction adds the ranks' contributions to an element as a pairwise tree in rank order
// (comm/reduction.h), whatever the transport and wherever the element lies in the tensor.
//
// Tensors: 1-D, contiguous, on the communicator's device(). They are worked on in place; nothing may
// touch them until the Pending has ended. On an accelerator an operation begins after what is
// enqueued to the calling thread's current stream, and nothing that is enqueued after Pending::wait()
// begins before its end (device/stream.h); the host does not wait unless the transport needs it.
// Errors: c10::Error naming the rank, the operation, its sequence number and `what` (say, the
// page). After the first error the communicator is broken and refuses further operations with the
// same message.
// Threads: one thread at a time calls; a Pending may be waited for on another.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "device/pending.h"

namespace zeropage::comm {

using memory::Pending;

namespace detail {
class Watch;
}  // namespace detail

enum class ReduceOp : uint8_t { kSum, kMean, kMin, kMax };

struct Traffic {
  int64_t bytes = 0;  // of payload
  int64_t messages = 0;

  friend bool operator==(const Traffic&, const Traffic&) = default;
};

// What this rank sent, by operation.
struct WireTraffic {
  Traffic all_gather;
  Traffic reduce_scatter;
  Traffic all_reduce;
  Traffic broadcast;
  Traffic pair;     // send and recv
  Traffic barrier;  // carries no payload
  Traffic reduce;
  Traffic gather;
  Traffic scatter;
  Traffic all_to_all;

  friend bool operator==(const WireTraffic&, const WireTraffic&) = default;
};

class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // whole: [size * slice_numel]. Rank r gives elements [r * slice_numel, (r + 1) * slice_numel);
  // all ranks get all.
  Pending all_gather(const at::Tensor& whole, std::string_view what);
  // whole: [size * slice_numel], every rank's own. Rank r's slice becomes the reduction; the others
  // keep their values.
  Pending reduce_scatter(const at::Tensor& whole, ReduceOp op, std::string_view what);
  // tensor: [numel], any numel. Becomes the reduction on all ranks.
  Pending all_reduce(const at::Tensor& tensor, ReduceOp op, std::string_view what);
  // tensor: [numel]. Becomes the root's on all ranks.
  Pending broadcast(const at::Tensor& tensor, int root, std::string_view what);
  // tensor: [numel], any numel, every rank's own. The root's becomes the reduction; the others keep their values.
  Pending reduce(const at::Tensor& tensor, ReduceOp op, int root, std::string_view what);
  // Every rank's slice to the root. tensor: the root's [size * slice_numel], with its own slice in place, and
  // slice r from rank r in the end; the others' [slice_numel].
  Pending gather(const at::Tensor& tensor, int root, std::string_view what);
  // A slice of the root's to every rank. tensor: the root's [size * slice_numel], which stays as it is; the others'
  // [slice_numel].
  Pending scatter(const at::Tensor& tensor, int root, std::string_view what);
  // given, received: [size * slice_numel], apart from each other. Slice r of what this rank gives goes to rank r; slice r
  // of what it receives comes from there.
  Pending all_to_all(const at::Tensor& given, const at::Tensor& received, std::string_view what);
  // Ends when all ranks have called it.
  Pending barrier(std::string_view what);
  // One rank's tensor to another's, both [numel]; the calls match in order for each pair of ranks.
  Pending send(const at::Tensor& tensor, int to_rank, std::string_view what);
  Pending recv(const at::Tensor& tensor, int from_rank, std::string_view what);

  // Blocks until every operation that this rank has begun here has ended on the host, with or without an error. If
  // a communicator is destroyed before, other ranks stay in operations that they have begun too, and they name this
  // rank as lost.
  void finish() noexcept;

  // The ranks whose connection to this one has broken. For waits in other communicators.
  virtual std::vector<int> lost_ranks() { return {}; }

  // What finds out why another rank does not come; null for communicators without one.
  virtual std::shared_ptr<detail::Watch> watch() const { return nullptr; }

  // The device of the tensors: parameters, gradients and other long ones.
  virtual c10::Device device() const { return c10::kCPU; }
  // Whether tensors of that device are moved too.
  virtual bool moves(c10::Device there) const { return there == device(); }
  // A tensor of [numel] elements on device(), not initialised.
  at::Tensor buffer(int64_t numel, at::ScalarType dtype) const;
  // Whether reductions add in comm/reduction.h's order.
  virtual bool has_fixed_order() const { return true; }
  // "gloo", for reports.
  virtual std::string_view transport() const = 0;
  WireTraffic wire_traffic() const { return sent(); }

 protected:
  Communicator(int rank, int size) : rank_(rank), size_(size) {}

 private:
  virtual Pending start_all_gather(const at::Tensor& whole, std::string what) = 0;
  virtual Pending start_reduce_scatter(const at::Tensor& whole, ReduceOp op, std::string what) = 0;
  virtual Pending start_all_reduce(const at::Tensor& tensor, ReduceOp op, std::string what) = 0;
  virtual Pending start_broadcast(const at::Tensor& tensor, int root, std::string what) = 0;
  virtual Pending start_barrier(std::string what) = 0;
  virtual Pending start_send(const at::Tensor& tensor, int to_rank, std::string what) = 0;
  virtual Pending start_recv(const at::Tensor& tensor, int from_rank, std::string what) = 0;
  virtual WireTraffic sent() const = 0;
  // A communicator that passes operations to another one implements these; by default they throw.
  virtual Pending start_reduce(const at::Tensor& tensor, ReduceOp op, int root, std::string what);
  virtual Pending start_gather(const at::Tensor& tensor, int root, std::string what);
  virtual Pending start_scatter(const at::Tensor& tensor, int root, std::string what);
  virtual Pending start_all_to_all(const at::Tensor& given, const at::Tensor& to, std::string what);

  Pending begun(const Pending& operation);

  const int rank_;
  const int size_;
  Pending last_;       // begun; they end in the order in which they begin
  std::string where_;  // these ranks meet, for words: " along \"data\""; "": in the whole world
  friend class World;  // says where
};

}  // namespace zeropage::comm
