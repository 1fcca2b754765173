#include "optim/cuda/current_stream.h"

#include <c10/cuda/CUDAStream.h>

namespace zeropage::optim::cuda {

void* current_stream(const c10::Device& device) {
  return c10::cuda::getCurrentCUDAStream(device.index()).stream();
}

}  // namespace zeropage::optim::cuda
