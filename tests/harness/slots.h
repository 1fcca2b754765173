// The shared-memory communicator where the kernel does not let ranks read each other's memory: all
// bytes pass through the slots of the segment.
#pragma once

#include <cstring>
#include <numeric>

#include "comm/shared_memory_communicator.h"

namespace zeropage::testing {

// Collective over `inner`, which only carries the segment's ticket.
inline std::unique_ptr<comm::Communicator> without_peer_memory(
    std::unique_ptr<comm::Communicator> inner) {
  using comm::detail::HostLink;
  using comm::detail::SharedSegment;
  SharedSegment segment;
  const auto ticket = at::zeros({256}, at::kByte);
  if (inner->rank() == 0) {
    segment = SharedSegment::create(HostLink::segment_bytes(static_cast<size_t>(inner->size())));
    std::strncpy(static_cast<char*>(ticket.data_ptr()), segment.ticket().c_str(), 255);
  }
  inner->broadcast(ticket, /*root=*/0, "the ticket").wait();
  if (inner->rank() != 0) {
    segment = SharedSegment::open(static_cast<const char*>(ticket.data_ptr()));
  }
  HostLink::Options options{.ranks = std::vector<int>(static_cast<size_t>(inner->size())),
                            .own = inner->rank(),
                            .deadline = std::chrono::seconds(30)};
  std::iota(options.ranks.begin(), options.ranks.end(), 0);
  auto link = std::make_unique<HostLink>(std::move(segment), options);
  inner->barrier("all have come").wait();
  link->find_peers();
  link->use_peer_memory(false);
  return comm::make_shared_memory_communicator(std::move(link));
}

}  // namespace zeropage::testing
