// Ranks over TCP, by c10d's Gloo as the engine for messages; the collectives are ours.
//
// Cost for N ranks and a tensor of B bytes, sent by each rank (the number of messages in brackets):
//   all_gather      B (N-1)/N        [N-1]              straight into place, no temporary
//   reduce_scatter  B (N-1)/N        [(N-1) x segments] 2 (N-1) segments of staging
//   all_reduce      2 B (N-1)/N      small tensors: B (N-1) in one round
//   broadcast       B x children in a binomial tree (the root: log2 N)
//
// c10d's own Gloo reduce-scatter clones the tensor and all-reduces it: twice the bytes, a full
// temporary, and an order of summation that depends on the position in the tensor.
#pragma once

#include <memory>

#include "comm/gloo/watched_link.h"
#include "zeropage/communicator.h"

namespace zeropage::comm {

// Connects to all peers; throws if one does not come within the deadline.
std::unique_ptr<Communicator> make_gloo_communicator(const detail::WatchedLink::Options& options);

}  // namespace zeropage::comm
