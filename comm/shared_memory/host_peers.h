// The ranks of this host: their processes, which of them are lost, and whether their memory can be read.
//
// Lifetime: the segment must outlive it. Threads: find() and read_memory() before all else; the rest any.
// Errors: PeerError for a peer whose memory is gone.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/detail/rank_names.h"
#include "comm/shared_memory/host_segment.h"
#include "comm/shared_memory/memory_access.h"
#include "comm/shared_memory/peer_process.h"

namespace zeropage::comm::detail {

class HostPeers {
 public:
  struct Options {
    std::vector<int> ranks;  // of this host, in the order that all of them use
    int own = 0;             // this rank's place among them
    RankNames names;         // of all ranks
    // A sample of the kind of memory that this rank's tensors will be in, which the others try to read; must live
    // until they have. Null: memory of this process like any other.
    uint64_t* sample = nullptr;
  };

  // Writes what the others need to find this rank.
  HostPeers(const HostSegment& segment, Options options);
  HostPeers(const HostPeers&) = delete;
  HostPeers& operator=(const HostPeers&) = delete;

  // REQUIRES: all ranks have constructed theirs. Whether the kernel lets this rank read the others'
  // memory; "" or why not.
  std::string find();
  // all_can: the same on all ranks. False, as at first: tensors pass through the segment.
  void read_memory(bool all_can);
  bool reads_memory() const { return reads_memory_; }

  int size() const { return static_cast<int>(options_.ranks.size()); }
  int own() const { return options_.own; }
  int rank_of(int place) const { return options_.ranks[static_cast<size_t>(place)]; }
  const RankNames& names() const { return options_.names; }
  int name_of(int place) const { return options_.names[rank_of(place)]; }
  const PeerProcess& process(int place) const { return processes_[static_cast<size_t>(place)]; }

  // Copies what lies there in the memory of the rank at that place.
  void read(int place, uint64_t address, void* into, int64_t bytes) const;
  // The ranks that left, ended with an error, or whose process has ended.
  std::vector<int> lost_ranks() const;
  // What is known of a rank's process, "; its process 7 is running"; "" for one of another host.
  std::string state_of(int rank) const;

 private:
  const HostSegment& segment_;
  const Options options_;
  std::vector<PeerProcess> processes_;  // by place
  uint64_t cookie_ = 0;
  bool reads_memory_ = false;
  std::optional<SiblingsMayRead> siblings_may_read_;
};

}  // namespace zeropage::comm::detail
