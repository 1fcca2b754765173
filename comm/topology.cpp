#include <unordered_map>

#include "zeropage/check.h"
#include "zeropage/simulation.h"

namespace zeropage::comm {

Topology::Topology(const std::vector<int>& hosts) {
  ZP_CHECK(!hosts.empty(), "a topology of no ranks; name the host of at least one");
  std::unordered_map<int, int> known;
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    const auto [at, is_new] = known.try_emplace(hosts[rank], static_cast<int>(ranks_of_.size()));
    if (is_new) ranks_of_.emplace_back();
    std::vector<int>& beside = ranks_of_[static_cast<size_t>(at->second)];
    places_.push_back({at->second, static_cast<int>(beside.size())});
    beside.push_back(static_cast<int>(rank));
  }
}

Topology Topology::even(int ranks, int ranks_per_host) {
  ZP_CHECK(ranks > 0 && ranks_per_host > 0, "a topology of ", ranks, " ranks, ", ranks_per_host,
           " a host: expected one or more of each");
  std::vector<int> hosts;
  for (int rank = 0; rank < ranks; ++rank) hosts.push_back(rank / ranks_per_host);
  return Topology(hosts);
}

std::vector<int> Topology::first_ranks() const {
  std::vector<int> ranks;
  for (const std::vector<int>& of_host : ranks_of_) ranks.push_back(of_host.front());
  return ranks;
}

int Topology::counterpart(int rank, int host) const {
  const std::vector<int>& there = ranks_of(host);
  return there[static_cast<size_t>(index_in_host(rank)) % there.size()];
}

}  // namespace zeropage::comm
