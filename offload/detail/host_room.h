// Host memory that can be taken without swapping, in bytes: MemAvailable of
// /proc/meminfo. Throws if /proc is not mounted.
#pragma once

#include <cstdint>

namespace zeropage::offload::detail {

int64_t available_host_bytes();

}  // namespace zeropage::offload::detail
