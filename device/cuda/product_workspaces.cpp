#include <c10/cuda/CUDAGuard.h>

#include "zeropage/device.h"

// LibTorch's. Their header, ATen/cuda/CUDAContextLight.h, needs those of libraries that nothing else here does.
namespace at::cuda {
size_t getChosenWorkspaceSize();
size_t getCUDABlasLtWorkspaceSize();
}  // namespace at::cuda

namespace zeropage::memory {

ProductWorkspaces product_workspaces(c10::Device device) {
  if (!device.is_cuda()) return {};
  // They tell of the current device.
  const c10::cuda::CUDAGuard guard(device);
  return {.of_products = static_cast<int64_t>(at::cuda::getChosenWorkspaceSize()),
          .of_biased_products = static_cast<int64_t>(at::cuda::getCUDABlasLtWorkspaceSize())};
}

}  // namespace zeropage::memory
