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

#include <chrono>
#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/communicator.h"

namespace zeropage::comm {

struct GlooOptions {
  c10::intrusive_ptr<c10d::Store> store;  // ranks meet here; keys are prefixed by the caller
  int rank = 0;
  int size = 1;
  // This host's name or address as its peers reach it.
  std::string bind_address = "127.0.0.1";
  // The rank whose process serves the store; -1: none of them.
  int store_server = -1;
  // How long an operation may wait for a peer.
  std::chrono::milliseconds deadline = std::chrono::seconds(60);
};

// Connects to all peers; throws if one does not come within the deadline.
std::unique_ptr<Communicator> make_gloo_communicator(const GlooOptions& options);

}  // namespace zeropage::comm
