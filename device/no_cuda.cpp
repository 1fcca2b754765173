#include "device/accelerator_driver.h"
#include "device/detail/cuda_device.h"
#include "device/detail/nvtx.h"
#include "zeropage/check.h"
#include "zeropage/device.h"

namespace zeropage::device::cuda {

int device_count() {
  device::note_driver_question("memory::device_count(cuda)");
  return 0;
}

std::string why_none() {
  return "this build of Zeropage has no CUDA; build the preset cuda (cmake --preset cuda), or "
         "train "
         "on the host";
}

std::string uuid(int /*index*/) {
  ZP_THROW(why_none());
}

std::string name(int /*index*/) {
  ZP_THROW(why_none());
}

void register_host_memory(void* /*data*/, int64_t /*bytes*/) {
  ZP_THROW(why_none());
}

void unregister_host_memory(void* /*data*/) noexcept {}

}  // namespace zeropage::device::cuda

namespace zeropage::device::nvtx {

void push(const char* /*name*/) {}
void pop() {}

}  // namespace zeropage::device::nvtx

namespace zeropage::memory {

bool has_cuda_driver() {
  return false;
}

ProductWorkspaces product_workspaces(c10::Device /*device*/) {
  return {};
}

}  // namespace zeropage::memory
