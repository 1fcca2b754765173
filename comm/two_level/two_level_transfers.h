// Tensors and slices that go from one rank to all, to one from all, or from each to each, on several hosts.
//
// A broadcast crosses to one rank of each host, who gives it to its neighbours. A slice crosses straight to
// the rank that wants it, and passes shared memory on its host.
//
// Lifetime: all that it is given must outlive it. Threads: the one that performs the operations.
// Throws: PeerError.
#pragma once

#include <vector>

#include "comm/detail/call.h"
#include "comm/gloo/gloo_link.h"
#include "comm/gloo/message_rounds.h"
#include "comm/gloo/slice_messages.h"
#include "comm/shared_memory/host_copies.h"
#include "comm/shared_memory/host_slices.h"
#include "zeropage/simulation.h"

namespace zeropage::comm::detail {

class TwoLevelTransfers {
 public:
  using Session = HostLink::Session;
  using Parts = HostSlices::Parts;

  // peers: of this rank's host, in ascending order of their ranks.
  TwoLevelTransfers(const Topology& topology, int rank, const HostPeers& peers, GlooLink& messages,
                    TrafficCounter& sent);

  // All make a session's meetings, the last one included. Tensors are those that were announced.
  void broadcast(const Call& call, Session& session, const at::Tensor& tensor, int root);
  // tensor: all slices, or this rank's where that is all that it has.
  void gather(const Call& call, Session& session, const at::Tensor& tensor, const Parts& parts,
              int root);
  void scatter(const Call& call, Session& session, const at::Tensor& tensor, const Parts& parts,
               int root);
  void exchange(const Call& call, Session& session, const at::Tensor& given,
                const at::Tensor& received, const Parts& parts);

 private:
  bool is_neighbour(int other) const { return topology_.host_of(other) == own_host_; }
  std::vector<int> far_ranks() const;
  void count_for_neighbours(const Call& call, const Parts& parts);

  const Topology& topology_;
  const int rank_;
  const int own_host_;
  const HostPeers& peers_;
  TrafficCounter& sent_;
  const HostCopies copies_{peers_};
  const HostSlices slices_{peers_};
  MessageRounds rounds_;
  SliceMessages messages_;
};

}  // namespace zeropage::comm::detail
