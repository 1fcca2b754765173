// Ranks with a CUDA device each, by c10d's NCCL: its collectives, and none of its watching over them.
// What they cost and how they add: comm/devices/device_communicator.h.
//
// c10d's own watchdog would end the process without naming a page, or hold what is under way while it
// dumps what it knows. It is told not to, by variables that are set to 0 where they are not set:
// TORCH_NCCL_ASYNC_ERROR_HANDLING, TORCH_NCCL_RETHROW_CUDA_ERRORS, TORCH_NCCL_ENABLE_MONITORING,
// TORCH_NCCL_DUMP_ON_TIMEOUT, TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC and TORCH_FR_BUFFER_SIZE. Every device
// needs a rank of its own.
//
// A build without CUDA has comm/devices/no_nccl.cpp instead.
#pragma once

#include <chrono>
#include <memory>

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/detail/rank_names.h"
#include "zeropage/communicator.h"

namespace zeropage::comm {

// Whether this build has it.
bool has_nccl();

struct NcclOptions {
  c10::intrusive_ptr<c10d::Store> store;  // for these ranks alone
  c10::Device device = c10::kCPU;         // with its index
  ReductionOrder order = ReductionOrder::kFast;
  std::chrono::milliseconds deadline;  // of connecting
  detail::RankNames names;
};

// Collective; connects. host: moves tensors of the host between the same ranks.
std::unique_ptr<Communicator> make_nccl_communicator(std::unique_ptr<Communicator> host,
                                                     const NcclOptions& options);

}  // namespace zeropage::comm
