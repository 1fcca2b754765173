#include "memory/check.h"
#include "memory/detail/cuda_device.h"

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

DeviceMemory memory(int /*index*/) {
  ZP_THROW(why_none());
}

}  // namespace zeropage::memory::cuda
