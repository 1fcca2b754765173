#include "device/detail/nvtx.h"

#include <nvtx3/nvToolsExt.h>

namespace zeropage::memory::nvtx {

void push(const char* name) {
  nvtxRangePushA(name);
}

void pop() {
  nvtxRangePop();
}

}  // namespace zeropage::memory::nvtx
