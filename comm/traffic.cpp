#include <utility>

#include "comm/detail/call.h"
#include "comm/detail/places.h"
#include "zeropage/check.h"
#include "zeropage/communicator.h"
#include "zeropage/simulation.h"

namespace zeropage::comm {
namespace {

TrafficModel::Algorithms algorithms_for(const Topology& topology, Transport transport) {
  using Algorithms = TrafficModel::Algorithms;
  ZP_CHECK(
      transport != Transport::kNccl,
      "the traffic of NCCL is not modelled; use Transport::kAuto, whose slices take as many bytes");
  ZP_CHECK(transport != Transport::kShared || topology.hosts() == 1, "shared memory between ",
           topology.hosts(), " hosts; use Transport::kAuto or Transport::kGloo");
  if (transport == Transport::kShared) return Algorithms::kSharedMemory;
  if (transport == Transport::kGloo || topology.hosts() == topology.size()) {
    return Algorithms::kMessages;
  }
  return topology.hosts() == 1 ? Algorithms::kSharedMemory : Algorithms::kTwoLevels;
}

}  // namespace

LinkTraffic& LinkTraffic::operator+=(const LinkTraffic& other) {
  within_host.bytes += other.within_host.bytes;
  within_host.messages += other.within_host.messages;
  between_hosts.bytes += other.between_hosts.bytes;
  between_hosts.messages += other.between_hosts.messages;
  return *this;
}

LinkTraffic& LinkTraffic::operator-=(const LinkTraffic& other) {
  within_host.bytes -= other.within_host.bytes;
  within_host.messages -= other.within_host.messages;
  between_hosts.bytes -= other.between_hosts.bytes;
  between_hosts.messages -= other.between_hosts.messages;
  return *this;
}

struct TrafficModel::Sliced {
  detail::Slices slices;
  int64_t element_bytes = 0;
  int64_t accumulator_bytes = 0;

  Sliced(int64_t numel, c10::ScalarType dtype, int ranks)
      : slices(detail::Slices::even(numel, ranks)),
        element_bytes(static_cast<int64_t>(c10::elementSize(dtype))),
        accumulator_bytes(static_cast<int64_t>(c10::elementSize(accumulator_of(dtype)))) {}

  static Sliced all_at(int root, int64_t numel, c10::ScalarType dtype) {
    Sliced sliced(numel, dtype, 1);
    sliced.slices = detail::Slices::all_at(root, numel);
    return sliced;
  }

  int64_t numel_of(int rank) const { return slices.count(rank); }
  int64_t bytes_of(int rank) const { return numel_of(rank) * element_bytes; }
};

TrafficModel::TrafficModel(Topology topology, Transport transport)
    : topology_(std::move(topology)), algorithms_(algorithms_for(topology_, transport)) {
  if (algorithms_ != Algorithms::kTwoLevels) return;
  for (int host = 0; host < topology_.hosts(); ++host) {
    Partials& partials = partials_.emplace_back();
    for (const RankRange& subtree : maximal_subtrees(topology_.ranks_of(host), topology_.size())) {
      ++(subtree.size() == 1 ? partials.of_one_rank : partials.of_several);
    }
  }
}

void TrafficModel::add(LinkTraffic& traffic, int from, int to, int64_t bytes,
                       int64_t messages) const {
  const bool same_host = topology_.host_of(from) == topology_.host_of(to);
  Traffic& link = same_host ? traffic.within_host : traffic.between_hosts;
  link.bytes += bytes;
  link.messages += messages;
}

LinkTraffic TrafficModel::all_gather(int rank, int64_t numel, c10::ScalarType dtype) const {
  return gather_slices(rank, Sliced(numel, dtype, topology_.size()));
}

LinkTraffic TrafficModel::reduce_scatter(int rank, int64_t numel, c10::ScalarType dtype) const {
  return reduce_slices(rank, Sliced(numel, dtype, topology_.size()));
}

LinkTraffic TrafficModel::all_reduce(int rank, int64_t numel, c10::ScalarType dtype) const {
  const Sliced sliced(numel, dtype, topology_.size());
  const int64_t bytes = numel * sliced.element_bytes;
  if (bytes > detail::kSmallBytes) {
    LinkTraffic traffic = reduce_slices(rank, sliced);
    traffic += gather_slices(rank, sliced);
    return traffic;
  }
  LinkTraffic traffic;
  for (int peer = 0; peer < topology_.size(); ++peer) {
    if (peer != rank) add(traffic, rank, peer, bytes);
  }
  return traffic;
}

// A rank gives what it holds: its slice and, on two levels, those it stands for.
LinkTraffic TrafficModel::gather_slices(int rank, const Sliced& sliced) const {
  LinkTraffic traffic;
  const int host = topology_.host_of(rank);
  const auto give = [&](int owner, int peer) {
    if (peer != rank && sliced.numel_of(owner) > 0) {
      add(traffic, rank, peer, sliced.bytes_of(owner));
    }
  };
  if (algorithms_ != Algorithms::kTwoLevels) {
    for (int peer = 0; peer < topology_.size(); ++peer) give(rank, peer);
    return traffic;
  }
  for (int other = 0; other < topology_.hosts(); ++other) {
    if (other != host) give(rank, topology_.counterpart(rank, other));
  }
  for (int owner = 0; owner < topology_.size(); ++owner) {
    if (topology_.counterpart(owner, host) != rank) continue;
    for (const int peer : topology_.ranks_of(host)) give(owner, peer);
  }
  return traffic;
}

LinkTraffic TrafficModel::reduce_slices(int rank, const Sliced& sliced) const {
  if (algorithms_ == Algorithms::kTwoLevels) return reduce_slices_by_host(rank, sliced);
  LinkTraffic traffic;
  const int64_t segment_numel = detail::kSegmentBytes / sliced.element_bytes;
  for (int owner = 0; owner < topology_.size(); ++owner) {
    if (owner == rank || sliced.numel_of(owner) == 0) continue;
    const int64_t segments = algorithms_ == Algorithms::kMessages
                                 ? base::div_ceil(sliced.numel_of(owner), segment_numel)
                                 : 1;
    add(traffic, rank, owner, sliced.bytes_of(owner), segments);
  }
  return traffic;
}

// What goes to a rank of another host is brought together with the neighbours' first.
LinkTraffic TrafficModel::reduce_slices_by_host(int rank, const Sliced& sliced) const {
  LinkTraffic traffic;
  const int host = topology_.host_of(rank);
  const Partials& partials = partials_[static_cast<size_t>(host)];
  for (int owner = 0; owner < topology_.size(); ++owner) {
    if (owner == rank || sliced.numel_of(owner) == 0) continue;
    const int collector = topology_.counterpart(owner, host);
    if (collector != rank) {
      add(traffic, rank, collector, sliced.bytes_of(owner));
    } else {
      add(traffic, rank, owner,
          partials.of_one_rank * sliced.bytes_of(owner) +
              partials.of_several * sliced.numel_of(owner) * sliced.accumulator_bytes,
          partials.of_one_rank + partials.of_several);
    }
  }
  return traffic;
}

LinkTraffic TrafficModel::broadcast(int rank, int root, int64_t numel,
                                    c10::ScalarType dtype) const {
  LinkTraffic traffic;
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  const int size = topology_.size();
  if (algorithms_ == Algorithms::kMessages) {
    detail::for_each_child((rank - root + size) % size, size,
                           [&](int child) { add(traffic, rank, (child + root) % size, bytes); });
    return traffic;
  }
  const int root_host = topology_.host_of(root);
  const int host = topology_.host_of(rank);
  const auto receiver_on = [&](int on_host) {
    return on_host == root_host ? root : topology_.ranks_of(on_host).front();
  };
  if (rank != receiver_on(host)) return traffic;
  const int hosts = topology_.hosts();
  detail::for_each_child((host - root_host + hosts) % hosts, hosts, [&](int child) {
    add(traffic, rank, receiver_on((child + root_host) % hosts), bytes);
  });
  for (const int peer : topology_.ranks_of(host)) {
    if (peer != rank) add(traffic, rank, peer, bytes);
  }
  return traffic;
}

LinkTraffic TrafficModel::reduce(int rank, int root, int64_t numel, c10::ScalarType dtype) const {
  const Sliced sliced(numel, dtype, topology_.size());
  if (numel * sliced.element_bytes <= detail::kSmallBytes) {
    return reduce_slices(rank, Sliced::all_at(root, numel, dtype));
  }
  LinkTraffic traffic = reduce_slices(rank, sliced);
  if (rank != root && sliced.numel_of(rank) > 0) add(traffic, rank, root, sliced.bytes_of(rank));
  return traffic;
}

LinkTraffic TrafficModel::gather(int rank, int root, int64_t numel, c10::ScalarType dtype) const {
  LinkTraffic traffic;
  const Sliced sliced(numel, dtype, topology_.size());
  if (rank != root && sliced.numel_of(rank) > 0) add(traffic, rank, root, sliced.bytes_of(rank));
  return traffic;
}

LinkTraffic TrafficModel::scatter(int rank, int root, int64_t numel, c10::ScalarType dtype) const {
  return rank == root ? all_to_all(rank, numel, dtype) : LinkTraffic();
}

LinkTraffic TrafficModel::all_to_all(int rank, int64_t numel, c10::ScalarType dtype) const {
  LinkTraffic traffic;
  const Sliced sliced(numel, dtype, topology_.size());
  for (int other = 0; other < topology_.size(); ++other) {
    if (other != rank && sliced.numel_of(other) > 0) {
      add(traffic, rank, other, sliced.bytes_of(other));
    }
  }
  return traffic;
}

// Within a host ranks meet without a message.
LinkTraffic TrafficModel::barrier(int rank) const {
  LinkTraffic traffic;
  const auto tell = [&](int peer) { add(traffic, rank, peer, 0); };
  if (algorithms_ == Algorithms::kMessages) {
    detail::for_each_round(rank, topology_.size(), [&](int told, int, int) { tell(told); });
  } else if (topology_.index_in_host(rank) == 0) {
    detail::for_each_round(topology_.host_of(rank), topology_.hosts(),
                           [&](int host, int, int) { tell(topology_.ranks_of(host).front()); });
  }
  return traffic;
}

LinkTraffic TrafficModel::send(int rank, int to_rank, int64_t numel, c10::ScalarType dtype) const {
  LinkTraffic traffic;
  add(traffic, rank, to_rank, numel * static_cast<int64_t>(c10::elementSize(dtype)));
  return traffic;
}

}  // namespace zeropage::comm
