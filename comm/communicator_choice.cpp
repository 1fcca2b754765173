#include "comm/communicator_choice.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <iostream>
#include <numeric>
#include <sys/stat.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/gloo_communicator.h"
#include "comm/shared_memory_communicator.h"
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

struct SharedMemory {
  std::unique_ptr<HostLink> link;  // null: cannot be had
  std::string reason;
};

// Collective. Every rank learns of every failure, so all come to the same end.
SharedMemory meet_in_shared_memory(const CommunicatorOptions& options) {
  SharedSegment segment;
  const std::vector<std::string> made = options.gather_text(
      "shared memory", attempt([&] {
        if (options.rank != 0) return std::string();
        segment = SharedSegment::create(HostLink::segment_bytes(static_cast<size_t>(options.size)));
        return segment.ticket();
      }));
  if (std::string reason = first_failure(made); !reason.empty()) return {nullptr, reason};

  SharedMemory shared;
  const std::vector<std::string> opened = options.gather_text(
      "shared memory", attempt([&] {
        if (options.rank != 0) segment = SharedSegment::open(made[0].substr(1));
        HostLink::Options here{.ranks = std::vector<int>(static_cast<size_t>(options.size)),
                               .own = options.rank,
                               .deadline = options.deadline};
        std::iota(here.ranks.begin(), here.ranks.end(), 0);
        shared.link = std::make_unique<HostLink>(std::move(segment), here);
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
  const bool one_host = std::all_of(options.hosts.begin(), options.hosts.end(),
                                    [&](const auto& host) { return host == options.hosts[0]; });
  ZP_CHECK(options.transport != Transport::kShared || one_host,
           "the shared-memory communicator was asked for, but the ranks are on several hosts; use "
           "auto or gloo");
  if (options.transport != Transport::kGloo && one_host) {
    SharedMemory shared = meet_in_shared_memory(options);
    if (shared.link) return make_shared_memory_communicator(std::move(shared.link));
    ZP_CHECK(options.transport != Transport::kShared,
             "the shared-memory communicator was asked for, but cannot be had: ", shared.reason,
             "; make room, or use gloo");
    if (options.rank == 0) {
      std::cerr << "zeropage: no shared memory between the ranks of this host (" << shared.reason
                << "); they use Gloo over TCP, which is slower" << std::endl;
    }
  }
  try {
    return make_gloo_communicator({
        .store = c10::make_intrusive<c10d::PrefixStore>("gloo", options.store),
        .rank = options.rank,
        .size = options.size,
        .bind_address = options.bind_address,
        .store_server = options.store_server,
        .deadline = options.deadline,
    });
  } catch (const std::exception& error) {
    options.fail_to_connect(error);
    throw;
  }
}

}  // namespace zeropage::comm
