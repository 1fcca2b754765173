#include "comm/two_level/two_level_transfers.h"

#include "comm/detail/places.h"

namespace zeropage::comm::detail {

TwoLevelTransfers::TwoLevelTransfers(const Topology& topology, int rank, const HostPeers& peers,
                                     GlooLink& messages, TrafficCounter& sent)
    : topology_(topology),
      rank_(rank),
      own_host_(topology.host_of(rank)),
      peers_(peers),
      sent_(sent),
      rounds_(messages, sent),
      messages_(messages, sent, rank, far_ranks()) {}

std::vector<int> TwoLevelTransfers::far_ranks() const {
  std::vector<int> ranks;
  for_each_other(rank_, topology_.size(), [&](int other) {
    if (!is_neighbour(other)) ranks.push_back(other);
  });
  return ranks;
}

void TwoLevelTransfers::broadcast(const Call& call, Session& session, const at::Tensor& tensor,
                                  int root) {
  const int root_host = topology_.host_of(root);
  std::vector<int> receivers = topology_.first_ranks();
  receivers[static_cast<size_t>(root_host)] = root;
  const int receiver = receivers[static_cast<size_t>(own_host_)];
  if (rank_ == receiver) {
    rounds_.broadcast(call, tensor, receivers, own_host_, root_host);
    const int neighbours = peers_.size() - 1;
    sent_.add(call.operation, call.bytes * neighbours, neighbours);
  }
  copies_.broadcast(session, tensor, topology_.index_in_host(receiver));
}

void TwoLevelTransfers::gather(const Call& call, Session& session, const at::Tensor& tensor,
                               const Parts& parts, int root) {
  const at::Tensor own = parts.own_lies_in_whole ? parts.slices.of(tensor, rank_) : tensor;
  messages_.gather(call, own, tensor, parts.slices, root);
  if (!is_neighbour(root)) {
    session.meet();
    return;
  }
  if (rank_ != root && parts.bytes(rank_) > 0) sent_.add(call.operation, parts.bytes(rank_));
  slices_.gather(session, parts, tensor, topology_.index_in_host(root));
}

void TwoLevelTransfers::scatter(const Call& call, Session& session, const at::Tensor& tensor,
                                const Parts& parts, int root) {
  if (rank_ == root) count_for_neighbours(call, parts);
  messages_.scatter(call, tensor, tensor, parts.slices, root);
  if (is_neighbour(root)) {
    slices_.scatter(session, parts, tensor, topology_.index_in_host(root));
  } else {
    session.meet();
  }
}

void TwoLevelTransfers::exchange(const Call& call, Session& session, const at::Tensor& given,
                                 const at::Tensor& received, const Parts& parts) {
  count_for_neighbours(call, parts);
  copy_bytes(parts.slices.of(received, rank_), parts.slices.of(given, rank_));
  slices_.exchange(session, parts, given, received);
  messages_.exchange(call, given, received, parts.slices);
}

// What they read of this rank.
void TwoLevelTransfers::count_for_neighbours(const Call& call, const Parts& parts) {
  for (const int neighbour : topology_.ranks_of(own_host_)) {
    const int64_t bytes = parts.bytes(neighbour);
    if (neighbour != rank_ && bytes > 0) sent_.add(call.operation, bytes);
  }
}

}  // namespace zeropage::comm::detail
