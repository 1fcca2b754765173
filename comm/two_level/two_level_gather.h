// Every rank's slice of a tensor, given to the ranks of several hosts.
//
// A slice crosses to its counterparts (zeropage/simulation.h), who then have it for their neighbours.
//
// Lifetime: all that it is given must outlive it. Threads: the one that performs the operations.
// Throws: PeerError.
#pragma once

#include "comm/detail/call.h"
#include "comm/gloo/gloo_link.h"
#include "comm/shared_memory/host_copies.h"
#include "comm/shared_memory/host_link.h"
#include "zeropage/simulation.h"

namespace zeropage::comm::detail {

class TwoLevelGather {
 public:
  // peers: of this rank's host, in ascending order of their ranks.
  TwoLevelGather(const Topology& topology, int rank, const HostPeers& peers, GlooLink& messages,
                 TrafficCounter& sent);

  // A session's meetings, the last one included.
  void perform(const Call& call, HostLink::Session& session, const at::Tensor& whole,
               const Slices& slices);

 private:
  void count_held(const Call& call, const at::Tensor& whole, const Slices& slices);

  const Topology& topology_;
  const int rank_;
  const HostPeers& peers_;
  GlooLink& messages_;
  TrafficCounter& sent_;
  const HostCopies copies_{peers_};
  // By place on this host: a rank's own slice, those of remote ranks it stands for, and both.
  HostCopies::Held own_slices_;
  HostCopies::Held collected_slices_;
  HostCopies::Held held_slices_;
};

}  // namespace zeropage::comm::detail
