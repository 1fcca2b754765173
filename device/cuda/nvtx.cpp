#include "device/detail/nvtx.h"

#include <nvtx3/nvToolsExt.h>

namespace zeropage::device::nvtx {

void push(const char* name) {
  nvtxRangePushA(name);
}

void pop() {
  nvtxRangePop();
}

}  // namespace zeropage::device::nvtx
