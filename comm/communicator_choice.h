// Chooses and makes the communicator of a world.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/watch/watch.h"
#include "zeropage/communicator.h"

namespace zeropage::comm {

// Two processes with the same identity can share memory: the host, its boot, the process namespace.
std::string host_identity();

struct CommunicatorOptions {
  Transport transport = Transport::kAuto;
  ReductionOrder reduction_order = ReductionOrder::kFast;
  c10::Device device = c10::kCPU;  // with its index, unless it is the host
  int rank = 0;
  int size = 1;
  std::vector<std::string> hosts;  // identities, by rank
  std::chrono::milliseconds deadline;
  std::shared_ptr<detail::Watch> watch;  // of these ranks; not started
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<c10d::Store> watched_store;  // WatchedLink::Options
  int store_server = -1;       // the rank that serves the store; -1: none of them
  int store_server_name = -1;  // WatchedLink::Options
  detail::RankNames names;
  bool says_what_is_slower = true;  // on stderr, on rank 0
  std::string bind_address;
  // World::gather_text.
  std::function<std::vector<std::string>(const std::string& topic, const std::string& text)>
      gather_text;
  // Throws, naming who is missing.
  std::function<void(const std::exception& error)> fail_to_connect;
};

// Collective: all ranks get the same kind. kAuto: shared memory on one host, two levels on several of
// which one has several ranks, Gloo otherwise. Where it would take shared memory and a host cannot
// have it, all take Gloo, and rank 0 says so once on stderr if asked to.
//
// On accelerators kAuto takes NCCL. Where it cannot be had, and for other transports, tensors pass
// through the host, by what carries the host's tensors; for kAuto rank 0 says so too.
std::unique_ptr<Communicator> make_communicator(const CommunicatorOptions& options);

}  // namespace zeropage::comm
