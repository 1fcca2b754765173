#include "comm/communicator_choice.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <iostream>
#include <sys/stat.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/gloo_communicator.h"
#include "comm/shared_memory_communicator.h"
#include "comm/topology.h"
#include "comm/two_level_communicator.h"
#include "memory/check.h"

namespace zeropage::comm {
namespace {

using detail::HostLink;
using detail::SharedSegment;

// A line of text for the other ranks: what worked, or why it did not.
template <typename Action>
std::string attempt(Action action) {
  try {
    return c10::str('+', action());
  } catch (const std::exception& error) {
    return c10::str('-', memory::message_of(error));
  }
}

// The first rank that failed, with its reason; "" if none did.
std::string first_failure(const std::vector<std::string>& outcomes) {
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    const std::string_view outcome = outcomes[rank];
    if (!outcome.starts_with('+')) {
      return c10::str("rank ", rank, ": ", outcome.empty() ? outcome : outcome.substr(1));
    }
  }
  return "";
}

Topology topology_of(const std::vector<std::string>& hosts) {
  std::vector<int> numbers;
  for (const std::string& host : hosts) {
    const auto first = std::find(hosts.begin(), hosts.end(), host);
    numbers.push_back(static_cast<int>(first - hosts.begin()));
  }
  return Topology(numbers);
}

struct SharedMemory {
  std::unique_ptr<HostLink> link;  // null: cannot be had
  std::string reason;
};

// Collective over the ranks of all hosts, each of which gets its own. Every rank learns of every
// failure, so all come to the same end.
SharedMemory meet_in_shared_memory(const CommunicatorOptions& options, const Topology& topology) {
  const std::vector<int>& here = topology.ranks_of(topology.host_of(options.rank));
  const int maker = here.front();
  SharedSegment segment;
  const std::vector<std::string> made =
      options.gather_text("shared memory", attempt([&] {
                            if (options.rank != maker) return std::string();
                            segment = SharedSegment::create(HostLink::segment_bytes(here.size()));
                            return segment.ticket();
                          }));
  if (std::string reason = first_failure(made); !reason.empty()) return {nullptr, reason};

  SharedMemory shared;
  const std::vector<std::string> opened = options.gather_text(
      "shared memory", attempt([&] {
        if (options.rank != maker) {
          segment = SharedSegment::open(made[static_cast<size_t>(maker)].substr(1));
        }
        shared.link = std::make_unique<HostLink>(
            std::move(segment), HostLink::Options{.ranks = here,
                                                  .own = topology.index_in_host(options.rank),
                                                  .deadline = options.deadline});
        return std::string();
      }));
  if (std::string reason = first_failure(opened); !reason.empty()) return {nullptr, reason};

  const std::vector<std::string> found =
      options.gather_text("shared memory", shared.link->find_peers());
  shared.link->use_peer_memory(
      std::all_of(found.begin(), found.end(), [](const auto& failure) { return failure.empty(); }));
  return shared;
}

}  // namespace

std::string host_identity() {
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat processes {};
  stat("/proc/self/ns/pid", &processes);
  return c10::str(host.data(), "/", boot, "/", processes.st_ino);
}

std::unique_ptr<Communicator> make_communicator(const CommunicatorOptions& options) {
  const Topology topology = topology_of(options.hosts);
  const bool one_host = topology.hosts() == 1;
  ZP_CHECK(options.transport != Transport::kShared || one_host,
           "the shared-memory communicator was asked for, but the ranks are on several hosts; use "
           "auto or gloo");
  SharedMemory shared;
  if (options.transport != Transport::kGloo && topology.hosts() < topology.size()) {
    shared = meet_in_shared_memory(options, topology);
    if (shared.link && one_host) return make_shared_memory_communicator(std::move(shared.link));
    ZP_CHECK(shared.link || options.transport != Transport::kShared,
             "the shared-memory communicator was asked for, but cannot be had: ", shared.reason,
             "; make room, or use gloo");
    if (!shared.link && options.rank == 0) {
      std::cerr << "zeropage: no shared memory between the ranks of a host (" << shared.reason
                << "); all use Gloo over TCP, which is slower" << std::endl;
    }
  }
  const detail::WatchedLink::Options messages{
      .store = c10::make_intrusive<c10d::PrefixStore>("gloo", options.store),
      .rank = options.rank,
      .size = options.size,
      .bind_address = options.bind_address,
      .store_server = options.store_server,
      .deadline = options.deadline,
  };
  try {
    if (shared.link) {
      return make_two_level_communicator(topology, std::move(shared.link), messages);
    }
    return make_gloo_communicator(messages);
  } catch (const std::exception& error) {
    options.fail_to_connect(error);
    throw;
  }
}

}  // namespace zeropage::comm
