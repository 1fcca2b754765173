// `Communicator`: collectives of ranks, without a module.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/TensorBody.h>
#include <c10/core/ScalarType.h>

#include "zeropage/detail/pending.h"

// What carries the bytes between ranks, and in which order they are added. All but kNccl with kFast
// give the same bits.

namespace zeropage::comm {

enum class Transport : uint8_t {
  // Between accelerators NCCL if it is possible. Otherwise shared memory between the ranks of a host if it is
  // possible, and Gloo between others.
  kAuto,
  kGloo,    // TCP between all ranks
  kShared,  // shared memory; throws where it cannot be had
  kNccl,    // from CUDA device to CUDA device; throws where it cannot be had
};

constexpr const char* name(Transport transport) {
  constexpr const char* kNames[] = {"auto", "gloo", "shared", "nccl"};
  return kNames[static_cast<size_t>(transport)];
}

// The order of a sum over ranks where NCCL carries the bytes. With other transports it is always
// fixed.
enum class ReductionOrder : uint8_t {
  // NCCL's, which depends on sizes, ranks and links, in the precision of the tensor.
  kFast,
  // zeropage/communicator.h's. Costs a buffer as large as the largest tensor.
  kFixed,
};

constexpr const char* name(ReductionOrder order) {
  return order == ReductionOrder::kFast ? "fast" : "fixed";
}

// Collectives between the ranks of a world.
//
// Every rank calls the same operations in the same order with the same sizes. An operation starts
// at once and runs beside the caller; the Pending it returns ends or throws. Operations of one
// communicator run one after the other, in the order of the calls.
//
// Bits: a reduction adds the ranks' contributions to an element as a pairwise tree in rank order
// (zeropage/communicator.h), whatever the transport and wherever the element lies in the tensor.
//
// Tensors: 1-D, contiguous, on the communicator's device(). They are worked on in place; nothing may
// touch them until the Pending has ended. On an accelerator an operation begins after what is
// enqueued to the calling thread's current stream, and nothing that is enqueued after Pending::wait()
// begins before its end (device/stream.h); the host does not wait unless the transport needs it.
// Errors: c10::Error naming the rank, the operation, its sequence number and `what` (say, the
// page). After the first error the communicator is broken and refuses further operations with the
// same message.
// Threads: one thread at a time calls; a Pending may be waited for on another.

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
  // Whether reductions add in zeropage/communicator.h's order.
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

// The fixed order in which ranks' contributions are added.
//
// A reduction over ranks [0, n) is the reduction over [0, h) combined with that over [h, n), h the
// largest power of two below n: ((0 1)(2 3))((4 5) 6) for seven ranks. It is taken element by
// element, in fp32 for bf16 and fp16 with one rounding at the end; a mean divides after the sum and
// before that rounding. The result depends on nothing but the values: not on bucket, slice,
// transport or timing.
// The dtype in which sums of elements of that dtype are held until they are rounded.
c10::ScalarType accumulator_of(c10::ScalarType dtype);

// Ranks [begin, end).
struct RankRange {
  int begin = 0;
  int end = 0;

  int size() const { return end - begin; }
  friend bool operator==(const RankRange&, const RankRange&) = default;
};

// The largest subtrees of the tree over ranks [0, size) that lie wholly within `ranks`, in rank
// order: what these ranks can add among themselves without changing a bit of the whole. ranks:
// ascending.
std::vector<RankRange> maximal_subtrees(std::span<const int> ranks, int size);

// out[i] = reduction over r of contributions[r][i], i in [0, numel). `out` may be one of the
// contributions. Throws for a dtype that it does not know.
void reduce_in_rank_order(std::span<const void* const> contributions, void* out, int64_t numel,
                          c10::ScalarType dtype, ReduceOp op);

// The same without the division and the rounding, for consecutive ranks that are a subtree: `out` is
// of accumulator_of(dtype).
void reduce_to_accumulators(std::span<const void* const> contributions, void* out, int64_t numel,
                            c10::ScalarType dtype, ReduceOp op);

// A partial sum of a subtree: the contribution of one rank, in the reduction's dtype, or the accumulators of
// several.
struct Partial {
  RankRange ranks;
  const void* data = nullptr;
};

// reduce_in_rank_order over all ranks from what is known of subtrees, bit for bit. partials: in rank
// order, together all ranks. `out` may be a contribution.
void combine_in_rank_order(std::span<const Partial> partials, void* out, int64_t numel,
                           c10::ScalarType dtype, ReduceOp op);

// The communicator of a world of one: every operation has ended when it returns, and a mean is the
// value itself.
class SoloCommunicator final : public Communicator {
 public:
  explicit SoloCommunicator(c10::Device device = c10::kCPU)
      : Communicator(/*rank=*/0, /*size=*/1), device_(device) {}

  c10::Device device() const override { return device_; }
  bool moves(c10::Device there) const override { return there == device_ || there.is_cpu(); }
  std::string_view transport() const override { return "solo"; }

 private:
  Pending start_all_gather(const at::Tensor&, std::string) override { return {}; }
  Pending start_reduce_scatter(const at::Tensor&, ReduceOp, std::string) override { return {}; }
  Pending start_all_reduce(const at::Tensor&, ReduceOp, std::string) override { return {}; }
  Pending start_broadcast(const at::Tensor&, int, std::string) override { return {}; }
  Pending start_barrier(std::string) override { return {}; }
  // Unreachable: the base refuses a peer that is this rank, and there is no other.
  Pending start_send(const at::Tensor&, int, std::string) override { return {}; }
  Pending start_recv(const at::Tensor&, int, std::string) override { return {}; }
  WireTraffic sent() const override { return {}; }
  Pending start_reduce(const at::Tensor&, ReduceOp, int, std::string) override { return {}; }
  Pending start_gather(const at::Tensor&, int, std::string) override { return {}; }
  Pending start_scatter(const at::Tensor&, int, std::string) override { return {}; }
  Pending start_all_to_all(const at::Tensor& given, const at::Tensor& received,
                           std::string) override {
    // Writes bytes as other communicators do: autograd and its counters see nothing.
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    received.copy_(given);
    return {};
  }

  const c10::Device device_;
};

}  // namespace zeropage::comm
