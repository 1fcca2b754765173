// How ranks of a host give each other what they hold: through slots, or straight from the holder's
// tensor where the kernel allows it and the tensor is large.
//
// Every rank of the host calls the same within the same session.
//
// Lifetime: the peers must outlive it. Threads: the one that performs the operations.
// Throws: PeerError.
#pragma once

#include <vector>

#include "comm/detail/call.h"
#include "comm/shared_memory/host_link.h"

namespace zeropage::comm::detail {

class HostCopies {
 public:
  // By place on the host: which slices of a tensor the rank there has and the others want.
  using Held = std::vector<std::vector<int>>;

  explicit HostCopies(const HostPeers& peers) : peers_(peers) {}

  bool gathers_through_slots(const at::Tensor& whole, const Slices& slices, const Held& held) const;
  // Brings what the others hold into place, in one meeting or more.
  void gather_through_slots(HostLink::Session& session, const at::Tensor& whole,
                            const Slices& slices, const Held& held) const;
  // The same between two meetings of the caller's.
  void gather_from_peers(const HostLink::Session& session, const at::Tensor& whole,
                         const Slices& slices, const Held& held) const;
  // The tensor of the rank at that place, to all; in one meeting or more.
  void broadcast(HostLink::Session& session, const at::Tensor& tensor, int root_place) const;

 private:
  void broadcast_through_slots(HostLink::Session& session, const at::Tensor& tensor,
                               int root_place) const;

  const HostPeers& peers_;
};

}  // namespace zeropage::comm::detail
