// Which ranks are on which host.
//
// Hosts are numbered from 0 in the order of their first ranks. Ranks of a host need not be
// consecutive.
// Where hosts hold several ranks, those of two hosts face each other: what a rank has for a remote
// rank goes to one rank beside it or beside the remote one, its counterpart there.
#pragma once

#include <vector>

namespace zeropage::comm {

class Topology {
 public:
  // hosts: by rank, any number that tells its host from others. Throws if there is none.
  explicit Topology(const std::vector<int>& hosts);

  // The first ranks on the first host, and so on; the last host may have fewer. Throws unless both
  // are positive.
  static Topology even(int ranks, int ranks_per_host);

  int size() const { return static_cast<int>(places_.size()); }
  int hosts() const { return static_cast<int>(ranks_of_.size()); }
  int host_of(int rank) const { return places_[static_cast<size_t>(rank)].host; }
  // A rank's place among those of its host, from 0.
  int index_in_host(int rank) const { return places_[static_cast<size_t>(rank)].index; }
  const std::vector<int>& ranks_of(int host) const { return ranks_of_[static_cast<size_t>(host)]; }

  // By host.
  std::vector<int> first_ranks() const;
  // The rank on `host` that stands for `rank`: itself on its own host.
  int counterpart(int rank, int host) const;

 private:
  struct Place {
    int host = 0;
    int index = 0;
  };
  std::vector<Place> places_;               // by rank
  std::vector<std::vector<int>> ranks_of_;  // by host, ascending
};

}  // namespace zeropage::comm
