#include "memory/check.h"
#include "memory/detail/cuda_device.h"
#include "memory/detail/nvtx.h"
#include "memory/device_memory.h"

namespace zeropage::memory::cuda {

int device_count() {
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

}  // namespace zeropage::memory::cuda

namespace zeropage::memory::nvtx {

void push(const char* /*name*/) {}
void pop() {}

}  // namespace zeropage::memory::nvtx

namespace zeropage::memory {

bool has_cuda_driver() {
  return false;
}
void observe_cuda_memory() {
  ZP_THROW(cuda::why_none());
}
int64_t cuda_reserved_bytes(c10::Device /*device*/) {
  ZP_THROW(cuda::why_none());
}
void record_cuda_memory_history(int64_t /*most_events*/) {
  ZP_THROW(cuda::why_none());
}
void write_cuda_memory_snapshot(const std::string& /*path*/) {
  ZP_THROW(cuda::why_none());
}

}  // namespace zeropage::memory
