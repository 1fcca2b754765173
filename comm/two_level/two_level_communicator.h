// Ranks of several hosts: shared memory within a host, messages between hosts.
//
// What a rank has for a remote one crosses between their hosts once, by the counterpart
// (zeropage/simulation.h), and reaches the others of a host through shared memory.
//
// Cost between hosts for N ranks, H hosts and a tensor of B bytes, sent by each rank where all hosts
// hold as many ranks (zeropage/simulation.h has the rest):
//   all_gather      B/N (H-1)
//   reduce_scatter  B/N (H-1) x the maximal subtrees of the reduction's tree in a host, one where its
//                   ranks are a power of two in a row; bf16 and fp16 sums cross in fp32
//   all_reduce      the sum of the two; up to 32 KiB: flat, B (N-1), in one round
//   broadcast       B x children in a binomial tree over hosts, from one rank a host
//   barrier         ceil(log2 H) rounds between the hosts' first ranks
// Memory: comm/two_level/two_level_reduction.h, and the host's shared segment.
//
// A reduction has the bits of the other communicators.
#pragma once

#include <memory>

#include "comm/gloo/watched_link.h"
#include "comm/shared_memory/host_link.h"
#include "zeropage/communicator.h"
#include "zeropage/simulation.h"

namespace zeropage::comm {

// host: met and with its peers found; its ranks are those of this rank's host in `topology`. Whether
// it reads peers is the same on all hosts. Connects to all peers; throws if one does not come within
// the deadline.
std::unique_ptr<Communicator> make_two_level_communicator(
    const Topology& topology, std::unique_ptr<detail::HostLink> host,
    const detail::WatchedLink::Options& messages);

}  // namespace zeropage::comm
