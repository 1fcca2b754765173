#include "comm/devices/nccl_environment.h"

#include <cstdlib>

namespace zeropage::comm::detail {
namespace {

constexpr const char* kSwitchedOff[] = {
    // The watchdog would end the process without a page's name.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS",
    "TORCH_NCCL_ENABLE_MONITORING",
    // After an error it would wait a minute for a dump that nobody writes, with its list of operations
    // locked, and then end the process's other operations late.
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
    // Pairs share the connection of all ranks on purpose: operations run in order.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING",
};
// Size of the flight recorder, which keeps a traceback of each operation. LibTorch warns of the older name
// wherever it is set.
constexpr const char* kRecorder = "TORCH_FR_BUFFER_SIZE";
constexpr const char* kRecorderBefore = "TORCH_NCCL_TRACE_BUFFER_SIZE";

}  // namespace

void leave_nccl_errors_to_us() {
  for (const char* variable : kSwitchedOff) setenv(variable, "0", /*overwrite=*/0);
  if (std::getenv(kRecorderBefore) == nullptr) setenv(kRecorder, "0", /*overwrite=*/0);
}

}  // namespace zeropage::comm::detail
