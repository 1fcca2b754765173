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
#include "comm/world_fields.h"
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
std::string outcome_of(Action action) {
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

struct SharedMemory {
  std::unique_ptr<HostLink> link;  // null: cannot be had
  std::string reason;
};

// Collective over the ranks of all hosts, each of which gets its own.
SharedMemory meet_in_shared_memory(const CommunicatorOptions& options, const Topology& topology) {
  const std::vector<int>& here = topology.ranks_of(topology.host_of(options.rank));
  const int maker = here.front();
  SharedSegment segment;
  const std::vector<std::string> made =
      options.gather_text("shared memory", outcome_of([&] {
                            if (options.rank != maker) return std::string();
                            segment = SharedSegment::create(HostLink::segment_bytes(here.size()));
                            return segment.ticket();
                          }));
  if (std::string reason = first_failure(made, options.names); !reason.empty())
    return {nullptr, reason};

  SharedMemory shared;
  std::optional<detail::StagingBuffer> staging;
  const std::vector<std::string> opened = options.gather_text(
      "shared memory", outcome_of([&] {
        if (options.rank != maker) {
          segment = SharedSegment::open(made[static_cast<size_t>(maker)].substr(1),
                                        HostLink::segment_bytes(here.size()));
        }
        HostLink::Options link{.peers = {.ranks = here,
                                         .own = topology.index_in_host(options.rank),
                                         .names = options.names},
                               .deadline = options.deadline,
                               .ends_at_deadline = false};
        if (device::has_streams(options.device.type())) {
          // Tensors pass through memory that a driver has mapped, which may be closed to other processes.
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

// What comes of an attempt: a communicator, or why these ranks cannot have it. Neither of them where
// the ranks' places rule it out and nobody would expect it.
struct Attempt {
  std::unique_ptr<Communicator> communicator;
  std::string obstacle = "";
};

// here: links the ranks of this host; null: messages go between all ranks.
Attempt connect(const CommunicatorOptions& options, std::unique_ptr<HostLink> here) {
  const detail::WatchedLink::Options messages{
      .store = c10::make_intrusive<c10d::PrefixStore>("gloo", options.store),
      .watched_store = c10::make_intrusive<c10d::PrefixStore>("gloo", options.watched_store),
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
    if (!here) return {make_gloo_communicator(messages)};
    return {make_two_level_communicator(topology_of(options.hosts), std::move(here), messages)};
  } catch (const std::exception& error) {
    options.fail_to_connect(error);
    throw;
  }
}

Attempt attempt_gloo(const CommunicatorOptions& options) {
  return connect(options, nullptr);
}

Attempt attempt_shared_memory(const CommunicatorOptions& options) {
  const Topology topology = topology_of(options.hosts);
  const bool one_host = topology.hosts() == 1;
  ZP_CHECK(options.transport != Transport::kShared || one_host,
           "the shared-memory communicator was asked for, but the ranks are on several hosts; use "
           "auto or gloo");
  if (topology.hosts() == topology.size()) return {};
  SharedMemory shared = meet_in_shared_memory(options, topology);
  if (!shared.link) return {nullptr, shared.reason};
  if (!one_host) return connect(options, std::move(shared.link));
  return {make_shared_memory_communicator(std::move(shared.link), options.watch)};
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

Attempt attempt_nccl(const CommunicatorOptions& options) {
  const bool on_host = !device::has_streams(options.device.type());
  ZP_CHECK(
      !on_host || options.transport != Transport::kNccl,
      "NCCL was asked for, but this world is on ", options.device,
      " and NCCL moves tensors of CUDA devices; set WorldOptions::device to c10::kCUDA, or use "
      "auto, gloo or shared");
  if (on_host) return {};
  if (std::string obstacle = why_no_nccl(options); !obstacle.empty()) return {nullptr, obstacle};
  CommunicatorOptions for_host = options;
  for_host.transport = Transport::kAuto;
  for_host.device = c10::kCPU;
  return {make_nccl_communicator(
      make_communicator(for_host),
      {.store = c10::make_intrusive<c10d::PrefixStore>("nccl", options.store),
       .device = options.device,
       .order = options.reduction_order,
       .deadline = options.deadline,
       .names = options.names})};
}

struct Backend {
  Transport transport;  // that asks for it
  // Collective: every rank learns of every failure, so all come to the same end.
  Attempt (*attempt)(const CommunicatorOptions& options);
  // What errors call it, and what they advise where it was asked for and cannot be had.
  const char* name = "";
  const char* advice = "";
  // What rank 0 says where kAuto goes on without it: what is missing, and what happens instead.
  const char* absence = "";
  const char* substitute = "";
};

// kAuto takes the first that the ranks can have.
constexpr std::array kBackends = {
    Backend{
        .transport = Transport::kNccl,
        .attempt = attempt_nccl,
        .name = "NCCL",
        .advice = "use auto or shared, which pass through the host, or give every rank a device",
        .absence = "no NCCL between the ranks",
        .substitute = "tensors pass through the host"},
    Backend{.transport = Transport::kShared,
            .attempt = attempt_shared_memory,
            .name = "the shared-memory communicator",
            .advice = "make room, or use gloo",
            .absence = "no shared memory between the ranks of a host",
            .substitute = "all use Gloo over TCP"},
    Backend{.transport = Transport::kGloo, .attempt = attempt_gloo}};
static_assert(kBackends.size() + 1 == words_of(std::type_identity<Transport>()).size(),
              "each transport but auto has a backend");

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
  for (const Backend& backend : kBackends) {
    const bool is_asked_for = options.transport == backend.transport;
    if (!is_asked_for && options.transport != Transport::kAuto) continue;
    auto [communicator, obstacle] = backend.attempt(options);
    if (communicator) {
      if (communicator->moves(options.device)) return std::move(communicator);
      return make_staged_communicator(std::move(communicator), options.device);
    }
    ZP_CHECK(!is_asked_for, backend.name, " was asked for, but cannot be had: ", obstacle, "; ",
             backend.advice);
    if (!obstacle.empty() && options.rank == 0 && options.says_what_is_slower) {
      std::cerr << "zeropage: " << backend.absence << " (" << obstacle << "); "
                << backend.substitute << ", which is slower" << std::endl;
    }
  }
  TORCH_INTERNAL_ASSERT(false, "no backend for transport ", name(options.transport));
}

}  // namespace zeropage::comm
