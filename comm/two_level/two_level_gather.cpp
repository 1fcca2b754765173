#include "comm/two_level/two_level_gather.h"

#include <vector>

namespace zeropage::comm::detail {

TwoLevelGather::TwoLevelGather(const Topology& topology, int rank, const HostPeers& peers,
                               GlooLink& messages, TrafficCounter& sent)
    : topology_(topology), rank_(rank), peers_(peers), messages_(messages), sent_(sent) {
  const int own_host = topology_.host_of(rank_);
  for (const int neighbour : topology_.ranks_of(own_host)) {
    own_slices_.push_back({neighbour});
    std::vector<int>& collected = collected_slices_.emplace_back();
    std::vector<int>& held = held_slices_.emplace_back();
    for (int owner = 0; owner < topology_.size(); ++owner) {
      if (topology_.counterpart(owner, own_host) != neighbour) continue;
      held.push_back(owner);
      if (owner != neighbour) collected.push_back(owner);
    }
  }
}

void TwoLevelGather::perform(const Call& call, HostLink::Session& session, const at::Tensor& whole,
                             const Slices& slices) {
  // Apart from the rounds of a reduction before it.
  constexpr uint64_t kRound = uint64_t{1} << 32;
  GlooLink::Exchange exchange(messages_);
  std::vector<size_t> tickets;
  for (const int owner : collected_slices_[static_cast<size_t>(peers_.own())]) {
    if (slices.count(owner) == 0) continue;
    tickets.push_back(exchange.recv(slices.of(whole, owner), owner, call.tag(kRound)));
  }
  const at::Tensor own = slices.of(whole, rank_);
  const int own_host = topology_.host_of(rank_);
  for (int host = 0; host < topology_.hosts() && own.numel() > 0; ++host) {
    if (host == own_host) continue;
    exchange.send(own, topology_.counterpart(rank_, host), call.tag(kRound));
    sent_.add(call.operation, bytes_of(own));
  }
  count_held(call, whole, slices);
  const auto wait_for_others = [&] {
    for (const size_t ticket : tickets) exchange.wait_recv(ticket);
  };
  if (copies_.gathers_through_slots(whole, slices, held_slices_)) {
    wait_for_others();
    copies_.gather_through_slots(session, whole, slices, held_slices_);
  } else {
    session.meet();
    copies_.gather_from_peers(session, whole, slices, own_slices_);
    wait_for_others();
    session.meet();
    copies_.gather_from_peers(session, whole, slices, collected_slices_);
    session.meet();
  }
  exchange.wait_sends();
}

// What the neighbours read of this rank.
void TwoLevelGather::count_held(const Call& call, const at::Tensor& whole, const Slices& slices) {
  const int neighbours = peers_.size() - 1;
  for (const int owner : held_slices_[static_cast<size_t>(peers_.own())]) {
    const int64_t bytes = slices.count(owner) * static_cast<int64_t>(whole.element_size());
    if (bytes > 0) sent_.add(call.operation, bytes * neighbours, neighbours);
  }
}

}  // namespace zeropage::comm::detail
