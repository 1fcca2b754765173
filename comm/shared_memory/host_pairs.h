// Messages between two ranks of a host, apart from the collectives.
//
// The receiver reads the sender's memory where it may; else bytes pass through the sender's outbox in the
// segment, two chunks in turn.
//
// Lifetime: what it is given must outlive it. Threads: one at a time.
// Errors: PeerError, as comm/shared_memory/host_wait.h, and for a message of another length.
#pragma once

#include "comm/detail/call.h"
#include "comm/shared_memory/host_peers.h"
#include "comm/shared_memory/host_segment.h"
#include "comm/shared_memory/host_wait.h"

namespace zeropage::comm::detail {

class HostPairs {
 public:
  HostPairs(const HostSegment& segment, const HostPeers& peers, HostWait& wait)
      : segment_(segment), peers_(peers), wait_(wait) {}

  // place: of the other rank. data: call.bytes.
  void send(int place, const Call& call, const void* data);
  void receive(int place, const Call& call, void* data);

 private:
  const HostSegment& segment_;
  const HostPeers& peers_;
  HostWait& wait_;
};

}  // namespace zeropage::comm::detail
