// Variables by which c10d's NCCL backend is told not to watch over operations: ours does that, and
// names the operation (detail/device_watch.h). c10d has no options for them.
//
// Threads: as setenv(), before others read the environment.
#pragma once

namespace zeropage::comm::detail {

// Sets those that are not set yet; what the user has set stays. To be called before a
// ProcessGroupNCCL is made, which reads them then.
void leave_nccl_errors_to_us();

}  // namespace zeropage::comm::detail
