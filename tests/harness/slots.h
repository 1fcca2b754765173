// Communicators where the kernel does not let ranks read each other's memory: all bytes within a
// host pass through the slots of its segment.
#pragma once

#include <cstring>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/shared_memory/shared_memory_communicator.h"
#include "comm/two_level/two_level_communicator.h"

namespace zeropage::testing {

// Collective over `inner`, which only carries the segments' tickets.
inline std::unique_ptr<comm::detail::HostLink> link_through_slots(comm::Communicator& inner,
                                                                  const comm::Topology& topology) {
  using comm::detail::HostLink;
  using comm::detail::SharedSegment;
  constexpr int64_t kTicketBytes = 256;
  const std::vector<int>& here = topology.ranks_of(topology.host_of(inner.rank()));
  SharedSegment segment;
  const auto tickets = at::zeros({inner.size() * kTicketBytes}, at::kByte);
  auto* texts = static_cast<char*>(tickets.data_ptr());
  const bool is_maker = inner.rank() == here.front();
  if (is_maker) {
    segment = SharedSegment::create(HostLink::segment_bytes(here.size()));
    std::strncpy(texts + inner.rank() * kTicketBytes, segment.ticket().c_str(), kTicketBytes - 1);
  }
  inner.all_gather(tickets, "the tickets").wait();
  if (!is_maker) {
    segment = SharedSegment::open(texts + here.front() * kTicketBytes,
                                  HostLink::segment_bytes(here.size()));
  }
  auto link = std::make_unique<HostLink>(
      std::move(segment), HostLink::Options{.ranks = here,
                                            .own = topology.index_in_host(inner.rank()),
                                            .deadline = std::chrono::seconds(30)});
  inner.barrier("all have come").wait();
  link->peers().find();
  link->peers().read_memory(false);
  return link;
}

inline std::unique_ptr<comm::Communicator> without_peer_memory(
    std::unique_ptr<comm::Communicator> inner) {
  return comm::make_shared_memory_communicator(
      link_through_slots(*inner, comm::Topology::even(inner->size(), inner->size())));
}

// store: for these ranks alone.
inline std::unique_ptr<comm::Communicator> two_levels_without_peer_memory(
    std::unique_ptr<comm::Communicator> inner, const comm::Topology& topology,
    const c10::intrusive_ptr<c10d::Store>& store) {
  return comm::make_two_level_communicator(
      topology, link_through_slots(*inner, topology),
      {.store = store, .rank = inner->rank(), .size = inner->size()});
}

}  // namespace zeropage::testing
