// Collectives between accelerators by a c10d backend that works on streams (NCCL), which moves the
// bytes from device to device. The host does not wait: an operation is enqueued at the call.
//
// Operations are enqueued to one stream, which first waits for what the caller's current stream
// holds; so they run one after the other, beside the caller's. The backend is asked to run collectives
// on that very stream (asyncOp = false); one that has a stream of its own for them works too, by an
// event there and one back. Each is a launch of its own: small ones are not coalesced. Tensors of the host, and barriers, go to the communicator of the host.
//
// Sums: ReductionOrder::kFast leaves the order to the backend, in the tensor's precision; a mean is
// its sum, divided once on the device. (fp16 alone is divided before, by the backend: its sums
// overflow.) kFixed is zeropage/communicator.h's order, with its bits: each rank gets the others'
// contributions to its slice, all-to-all, and adds them itself.
//
// Cost for N ranks and a tensor of B bytes, as wire_traffic() counts it, by a ring's formulas:
//   all_gather, reduce_scatter   B (N-1)/N    kFixed: a buffer of B, and accumulators of a slice
//   all_reduce                   2 B (N-1)/N  kFixed: the same; twice B where N does not divide it
//   broadcast                    B, but for the rank before the root
//   reduce                       B, but for the root  kFixed: as all_reduce, and always twice B
//   gather, scatter              B/N from each to the root, B (N-1)/N from the root
//   all_to_all                   B (N-1)/N
//
// Errors: ranks that call different operations, one that is lost, stopped or busy: the watch of `host`
// tells them apart (detail/device_watch.h). An error is thrown by the next call or Pending::wait().
#pragma once

#include <memory>
#include <string>

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "comm/detail/rank_names.h"
#include "zeropage/communicator.h"

namespace zeropage::comm {

struct DeviceCommunicatorOptions {
  // Connected. Its abort() is called from another thread, and ends what is under way.
  c10::intrusive_ptr<c10d::Backend> backend;
  c10::Device device = c10::kCPU;  // with its index
  ReductionOrder order = ReductionOrder::kFast;
  std::string transport;  // "nccl"
  detail::RankNames names;
};

// host: moves tensors of the host between the same ranks.
std::unique_ptr<Communicator> make_device_communicator(std::unique_ptr<Communicator> host,
                                                       DeviceCommunicatorOptions options);

}  // namespace zeropage::comm
