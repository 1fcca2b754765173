// Ranks of one host, through shared memory.
//
// The kernel copies a large tensor once, straight from one rank's memory to the other's
// (process_vm_readv); where it may not, and for small tensors, the bytes pass through slots of
// 256 KiB in a shared segment, in two copies. Nothing of the tensors need be in shared memory.
//
// Cost for N ranks and a tensor of B bytes (counted as sent: what others read from this rank):
//   all_gather      B (N-1)/N      2 meetings  no temporary
//   reduce_scatter  B (N-1)/N      2 meetings  N-1 segments of 128 KiB, kept for later calls
//   all_reduce      2 B (N-1)/N    3 meetings  as reduce_scatter; up to 32 KiB: B (N-1), 1 meeting
//   broadcast       B (N-1) from the root      2 meetings
// A tensor (all_gather: a slice) that fits a slot takes one meeting.
//
// Not NUMA-aware; one host, up to kMostHostRanks ranks.
#pragma once

#include <memory>

#include "comm/shared_memory/host_link.h"
#include "comm/watch/watch.h"
#include "zeropage/communicator.h"

namespace zeropage::comm {

// link: met and with its peers found; its ranks are all of the world, in their order. watch: not started;
// decides how long an operation waits. Null: the link's deadline does.
std::unique_ptr<Communicator> make_shared_memory_communicator(
    std::unique_ptr<detail::HostLink> link, std::shared_ptr<detail::Watch> watch = nullptr);

}  // namespace zeropage::comm
