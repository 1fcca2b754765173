// Every rank's slice of a tensor, reduced over ranks of several hosts.
//
// The counterpart of a remote rank reads what its neighbours have for that rank, brings it to one
// partial a maximal subtree (zeropage/communicator.h) and sends those; the owner combines them with what its
// own neighbours have. All of it segment by segment, one segment being made while those of others
// arrive.
//
// Memory: a segment is 512 KiB in the accumulator's type. Kept for later calls: two segments for each
// partial that this rank sends or gets, one for each neighbour.
//
// Lifetime: all that it is given must outlive it. Threads: the one that performs the operations.
// Throws: PeerError.
#pragma once

#include <vector>

#include "comm/detail/call.h"
#include "comm/gloo/gloo_link.h"
#include "comm/shared_memory/host_link.h"
#include "zeropage/communicator.h"
#include "zeropage/simulation.h"

namespace zeropage::comm::detail {

class TwoLevelReduction {
 public:
  // peers: of this rank's host, in ascending order of their ranks.
  TwoLevelReduction(const Topology& topology, int rank, const HostPeers& peers, GlooLink& messages,
                    TrafficCounter& sent);

  // The session's first meeting is made here. When a rank returns, no other reads its tensor.
  void perform(const Call& call, HostLink::Session& session, const at::Tensor& whole,
               const Slices& slices, ReduceOp op);

 private:
  class Run;

  // Buffer `index` of those kinds, of kSegmentBytes.
  at::Tensor& buffer(std::vector<at::Tensor>& buffers, size_t index) const;

  const Topology& topology_;
  const int rank_;
  const int own_host_;
  const HostPeers& peers_;
  GlooLink& messages_;
  TrafficCounter& sent_;
  std::vector<std::vector<RankRange>> subtrees_;  // by host, the maximal ones
  std::vector<int> collected_;                    // the remote ranks that this one stands for

  std::vector<at::Tensor> outgoing_;  // [2][collected][own subtrees]
  std::vector<at::Tensor> incoming_;  // [2][subtrees of other hosts]
  std::vector<at::Tensor> read_;      // by place on this host
};

}  // namespace zeropage::comm::detail
