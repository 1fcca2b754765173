// What one rank sends in one operation, from sizes alone: what the communicators put on the wire.
//
// Three sets of algorithms, chosen as the real communicators are:
// * messages (Transport::kGloo, or one rank a host): each slice straight to its owner, in segments;
//   a broadcast along a binomial tree, a barrier by dissemination.
// * shared memory (all ranks on one host): each slice counts once for each rank that takes it.
// * two levels (several hosts with several ranks): within a host as in shared memory, between
//   hosts once, by the counterpart (comm/topology.h). A reduction sends one partial sum a maximal
//   subtree of the reduction's tree (comm/reduction.h), so that the bits stay the same.
//
// Operations with a root, and all_to_all, send straight to the receiver, whatever hosts lie between. A reduction to
// a root is a reduce_scatter and a gather above 32 KiB, and goes straight to the root below.
//
// N ranks, B bytes: all_gather, reduce_scatter and all_to_all B (N-1)/N, all_reduce twice that, a binomial
// broadcast ceil(log2 N) times B at the root (Thakur, Rabenseifner, Gropp 2005, "Optimization of
// Collective Communication Operations in MPICH", section 4).
//
// Pure integers; thread-safe. Ranks must be in [0, topology().size()), unchecked.
#pragma once

#include <cstdint>
#include <vector>

#include <c10/core/ScalarType.h>

#include "comm/communicator.h"
#include "comm/topology.h"
#include "comm/transport.h"

namespace zeropage::comm {

// What a rank sends, by the kind of link it takes.
struct LinkTraffic {
  Traffic within_host;
  Traffic between_hosts;

  Traffic total() const {
    return {within_host.bytes + between_hosts.bytes, within_host.messages + between_hosts.messages};
  }
  LinkTraffic& operator+=(const LinkTraffic& other);
  LinkTraffic& operator-=(const LinkTraffic& other);
  friend bool operator==(const LinkTraffic&, const LinkTraffic&) = default;
};

class TrafficModel {
 public:
  enum class Algorithms : uint8_t { kMessages, kSharedMemory, kTwoLevels };

  // Throws for shared memory between hosts.
  TrafficModel(Topology topology, Transport transport);

  const Topology& topology() const { return topology_; }
  Algorithms algorithms() const { return algorithms_; }

  // numel: of the whole tensor, divisible by the world size.
  LinkTraffic all_gather(int rank, int64_t numel, c10::ScalarType dtype) const;
  LinkTraffic reduce_scatter(int rank, int64_t numel, c10::ScalarType dtype) const;
  LinkTraffic all_reduce(int rank, int64_t numel, c10::ScalarType dtype) const;
  LinkTraffic broadcast(int rank, int root, int64_t numel, c10::ScalarType dtype) const;
  // numel: of what is reduced, or of what the root has whole.
  LinkTraffic reduce(int rank, int root, int64_t numel, c10::ScalarType dtype) const;
  LinkTraffic gather(int rank, int root, int64_t numel, c10::ScalarType dtype) const;
  LinkTraffic scatter(int rank, int root, int64_t numel, c10::ScalarType dtype) const;
  LinkTraffic all_to_all(int rank, int64_t numel, c10::ScalarType dtype) const;
  LinkTraffic barrier(int rank) const;
  LinkTraffic send(int rank, int to_rank, int64_t numel, c10::ScalarType dtype) const;

 private:
  // Where a tensor's slices lie: rank r has elements [r slice_numel, (r + 1) slice_numel) of numel.
  struct Sliced;

  LinkTraffic gather_slices(int rank, const Sliced& sliced) const;
  LinkTraffic reduce_slices(int rank, const Sliced& sliced) const;
  LinkTraffic reduce_slices_by_host(int rank, const Sliced& sliced) const;
  void add(LinkTraffic& traffic, int from, int to, int64_t bytes, int64_t messages = 1) const;

  const Topology topology_;
  const Algorithms algorithms_;
  // By host: how many maximal subtrees of one rank, and of more, its ranks make up.
  struct Partials {
    int64_t of_one_rank = 0;
    int64_t of_several = 0;
  };
  std::vector<Partials> partials_;
};

}  // namespace zeropage::comm
