#include "comm/shared_memory/host_peers.h"

#include <algorithm>
#include <cstring>
#include <unistd.h>
#include <utility>

#include "comm/detail/peer_error.h"

namespace zeropage::comm::detail {
namespace {

// What a rank tries to read in another's memory.
constexpr uint64_t kCookie = 0x5A65726F70616765ULL;

}  // namespace

HostPeers::HostPeers(const HostSegment& segment, std::vector<int> ranks, int own, uint64_t* sample)
    : segment_(segment), ranks_(std::move(ranks)), own_(own), processes_(ranks_.size()) {
  if (sample == nullptr) sample = &cookie_;
  *sample = kCookie;
  HostSegment::Board& ours = segment_.board(own_);
  ours.announcements[0].address = reinterpret_cast<uint64_t>(sample);
  siblings_may_read_.emplace();
  ours.pid.store(getpid(), std::memory_order_release);
}

std::string HostPeers::find() {
  for (int place = 0; place < size(); ++place) {
    processes_[static_cast<size_t>(place)] = PeerProcess(segment_.board(place).pid.load());
  }
  for (int place = 0; place < size(); ++place) {
    if (place == own_) continue;
    uint64_t cookie = 0;
    const int error = process(place).read(segment_.board(place).announcements[0].address, &cookie,
                                          sizeof(cookie));
    if (error != 0 || cookie != kCookie) {
      return c10::str("rank ", rank_of(own_), " cannot read the memory of rank ", rank_of(place),
                      " (process ", process(place).pid(),
                      "): ", error != 0 ? std::strerror(error) : "it reads other values");
    }
  }
  return "";
}

void HostPeers::read_memory(bool all_can) {
  reads_memory_ = all_can;
  if (!all_can) siblings_may_read_.reset();
}

void HostPeers::read(int place, uint64_t address, void* into, int64_t bytes) const {
  const int error = process(place).read(address, into, static_cast<size_t>(bytes));
  if (error == 0) return;
  const int rank = rank_of(place);
  throw PeerError::explain(
      rank, c10::str("lost rank ", rank, " (process ", process(place).pid(), ", ",
                     std::strerror(error), " reading its memory); it has ended or was killed. See ",
                     "the last lines of rank ", rank));
}

std::vector<int> HostPeers::lost_ranks() const {
  std::vector<int> lost;
  for (int place = 0; place < size(); ++place) {
    if (place == own_) continue;
    const auto condition = segment_.board(place).condition.load();
    if (condition != HostSegment::Condition::kPresent || process(place).has_ended()) {
      lost.push_back(rank_of(place));
    }
  }
  return lost;
}

std::string HostPeers::state_of(int rank) const {
  const auto at = std::find(ranks_.begin(), ranks_.end(), rank);
  if (at == ranks_.end()) return "";
  const PeerProcess& peer = process(static_cast<int>(at - ranks_.begin()));
  return c10::str("; its process ", peer.pid(), " ", peer.state());
}

}  // namespace zeropage::comm::detail
