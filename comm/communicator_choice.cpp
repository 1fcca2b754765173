#include "comm/communicator_choice.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <iostream>
#include <optional>
#include <sys/stat.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/devices/nccl_communicator.h"
#include "comm/devices/staged_communicator.h"
#include "comm/devices/staging_buffer.h"
#include "comm/gloo/gloo_communicator.h"
#include "comm/shared_memory/shared_memory_communicator.h"
#include "comm/two_level/two_level_communicator.h"
#include "device/stream.h"
#include "zeropage/check.h"
#include "zeropage/device.h"
#include "zeropage/simulation.h"

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
std::string first_failure(const std::vector<std::string>& outcomes,
                          const detail::RankNames& names) {
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    const std::string_view outcome = outcomes[rank];
    if (!outcome.starts_with('+')) {
      return c10::str("rank ", names[static_cast<int>(rank)], ": ",
                      outcome.empty() ? outcome : outcome.substr(1));
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

// Whose bytes a communicator of the host moves.
enum class Carried : uint8_t { kTensorsOfTheHost, kStagedTensors };

struct SharedMemory {
  std::unique_ptr<HostLink> link;  // null: cannot be had
  std::string reason;
};

// Collective over the ranks of all hosts, each of which gets its own. Every rank learns of every
// failure, so all come to the same end.
SharedMemory meet_in_shared_memory(const CommunicatorOptions& options, const Topology& topology,
                                   Carried carried) {
  const std::vector<int>& here = topology.ranks_of(topology.host_of(options.rank));
  const int maker = here.front();
  SharedSegment segment;
  const std::vector<std::string> made =
      options.gather_text("shared memory", attempt([&] {
                            if (options.rank != maker) return std::string();
                            segment = SharedSegment::create(HostLink::segment_bytes(here.size()));
                            return segment.ticket();
                          }));
  if (std::string reason = first_failure(made, options.names); !reason.empty())
    return {nullptr, reason};

  SharedMemory shared;
  std::optional<detail::StagingBuffer> staging;
  const std::vector<std::string> opened = options.gather_text(
      "shared memory", attempt([&] {
        if (options.rank != maker) {
          segment = SharedSegment::open(made[static_cast<size_t>(maker)].substr(1),
                                        HostLink::segment_bytes(here.size()));
        }
        HostLink::Options link{.peers = {.ranks = here,
                                         .own = topology.index_in_host(options.rank),
                                         .names = options.names},
                               .deadline = options.deadline,
                               .ends_at_deadline = false};
        if (carried == Carried::kStagedTensors) {
          // Memory that a driver has mapped may be closed to other processes.
          const at::Tensor sample = staging.emplace(options.device).take(1, at::kLong);
          link.peers.sample = static_cast<uint64_t*>(sample.data_ptr());
        }
        shared.link = std::make_unique<HostLink>(std::move(segment), link);
        return std::string();
      }));
  if (std::string reason = first_failure(opened, options.names); !reason.empty())
    return {nullptr, reason};

  const std::vector<std::string> found =
      options.gather_text("shared memory", shared.link->peers().find());
  shared.link->peers().read_memory(
      std::all_of(found.begin(), found.end(), [](const auto& failure) { return failure.empty(); }));
  return shared;
}

std::unique_ptr<Communicator> make_host_communicator(const CommunicatorOptions& options,
                                                     Carried carried) {
  const Topology topology = topology_of(options.hosts);
  const bool one_host = topology.hosts() == 1;
  ZP_CHECK(options.transport != Transport::kShared || one_host,
           "the shared-memory communicator was asked for, but the ranks are on several hosts; use "
           "auto or gloo");
  SharedMemory shared;
  if (options.transport != Transport::kGloo && topology.hosts() < topology.size()) {
    shared = meet_in_shared_memory(options, topology, carried);
    if (shared.link && one_host)
      return make_shared_memory_communicator(std::move(shared.link), options.watch);
    ZP_CHECK(shared.link || options.transport != Transport::kShared,
             "the shared-memory communicator was asked for, but cannot be had: ", shared.reason,
             "; make room, or use gloo");
    if (!shared.link && options.rank == 0 && options.says_what_is_slower) {
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
      .store_server_name = options.store_server_name,
      .names = options.names,
      .deadline = options.deadline,
      .watch = options.watch,
      .hosts = options.hosts,
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

// The first two ranks that compute on one device; "" if none do. devices: "+" and a device's name.
std::string shared_device(const std::vector<std::string>& devices, const detail::RankNames& names) {
  for (size_t rank = 0; rank < devices.size(); ++rank) {
    for (size_t earlier = 0; earlier < rank; ++earlier) {
      if (devices[earlier] != devices[rank]) continue;
      return c10::str("ranks ", names[static_cast<int>(earlier)], " and ",
                      names[static_cast<int>(rank)], " share the device ", devices[rank].substr(1));
    }
  }
  return "";
}

// Collective. Why the ranks cannot have NCCL between their devices; "" if they can.
std::string why_no_nccl(const CommunicatorOptions& options) {
  const auto own = [&]() -> std::string {
    if (!options.device.is_cuda()) {
      return c10::str("-NCCL moves tensors of CUDA devices, not of ", options.device.str());
    }
    if (!has_nccl()) return "-its build of Zeropage has no NCCL";
    return c10::str('+', memory::device_name(options.device), " (",
                    memory::device_identity(options.device), ")");
  };
  const std::vector<std::string> devices = options.gather_text("devices", own());
  const std::string failure = first_failure(devices, options.names);
  return failure.empty() ? shared_device(devices, options.names) : failure;
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
  const bool on_host = !device::has_streams(options.device.type());
  ZP_CHECK(
      !on_host || options.transport != Transport::kNccl,
      "NCCL was asked for, but this world is on ", options.device,
      " and NCCL moves tensors of CUDA devices; set WorldOptions::device to c10::kCUDA, or use "
      "auto, gloo or shared");
  if (on_host) return make_host_communicator(options, Carried::kTensorsOfTheHost);
  const bool wants_nccl = options.transport == Transport::kNccl;
  const bool may_have_nccl = wants_nccl || options.transport == Transport::kAuto;
  const std::string obstacle = may_have_nccl ? why_no_nccl(options) : "";
  ZP_CHECK(!wants_nccl || obstacle.empty(), "NCCL was asked for, but cannot be had: ", obstacle,
           "; use auto or shared, which pass through the host, or give every rank a device");
  CommunicatorOptions for_host = options;
  if (wants_nccl) for_host.transport = Transport::kAuto;
  const bool by_nccl = may_have_nccl && obstacle.empty();
  std::unique_ptr<Communicator> host = make_host_communicator(
      for_host, by_nccl ? Carried::kTensorsOfTheHost : Carried::kStagedTensors);
  if (by_nccl) {
    return make_nccl_communicator(
        std::move(host), {.store = c10::make_intrusive<c10d::PrefixStore>("nccl", options.store),
                          .device = options.device,
                          .order = options.reduction_order,
                          .deadline = options.deadline,
                          .names = options.names});
  }
  if (may_have_nccl && options.rank == 0 && options.says_what_is_slower) {
    std::cerr << "zeropage: no NCCL between the ranks (" << obstacle
              << "); tensors pass through the host, which is slower" << std::endl;
  }
  return make_staged_communicator(std::move(host), options.device);
}

}  // namespace zeropage::comm
