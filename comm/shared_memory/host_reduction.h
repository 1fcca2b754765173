// How ranks of a host reduce what they hold: each its own slice, or all of a small tensor. Through slots, or
// straight from the others' tensors where the kernel allows it and the tensor is large.
//
// Every rank of the host calls the same within the same session. The order of summation is
// zeropage/communicator.h's.
//
// Memory: 128 KiB for each other rank, from the first reduction on that reads the others' tensors.
// Lifetime: the peers must outlive it. Threads: the one that performs the operations.
// Throws: PeerError.
#pragma once

#include "comm/detail/call.h"
#include "comm/shared_memory/host_link.h"
#include "zeropage/communicator.h"

namespace zeropage::comm::detail {

class HostReduction {
 public:
  explicit HostReduction(const HostPeers& peers) : peers_(peers) {}

  // Whether reduce_through_slots() is the way for a tensor of so many bytes.
  bool goes_through_slots(int64_t bytes) const {
    return bytes <= HostLink::kSlotBytes || !peers_.reads_memory();
  }
  // In one meeting or more. gather: all ranks get all slices.
  void reduce_through_slots(HostLink::Session& session, const at::Tensor& whole,
                            const Slices& slices, ReduceOp op, bool gather) const;
  // Between two meetings of the caller's.
  void reduce_from_peers(const HostLink::Session& session, const at::Tensor& whole,
                         const Slices& slices, ReduceOp op);
  // Each rank its own slice, by either way; in one meeting or more.
  void reduce_slices(HostLink::Session& session, const at::Tensor& whole, const Slices& slices,
                     ReduceOp op);
  // Every rank reduces the whole tensor, of at most a slot, in one meeting.
  void reduce_everywhere(HostLink::Session& session, const at::Tensor& tensor, ReduceOp op) const;

 private:
  std::byte* staging();

  const HostPeers& peers_;
  at::Tensor staging_;  // one segment for each other rank
};

}  // namespace zeropage::comm::detail
