#include "memory/expandable_segments.h"

#include <cstdlib>
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <c10/core/AllocatorConfig.h>

namespace zeropage::memory {
namespace {

using c10::CachingAllocator::AcceleratorAllocatorConfig;

bool is_set_by_user() {
  return std::getenv("PYTORCH_ALLOC_CONF") != nullptr ||
         std::getenv("PYTORCH_CUDA_ALLOC_CONF") != nullptr ||
         !c10::CachingAllocator::getAllocatorSettings().empty();
}

// Only the driver tells.
bool can_map_memory(int device) {
  constexpr unsigned int kSinceCuda = 12000;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t result = cudaGetDriverEntryPointByVersion(
      "cuDeviceGetAttribute", &function, kSinceCuda, cudaEnableDefault, &found);
  if (result != cudaSuccess || found != cudaDriverEntryPointSuccess) {
    // The error stays in CUDA's per-thread state, where LibTorch's next check would find it.
    cudaGetLastError();
    return false;
  }
  const auto get_attribute =
      reinterpret_cast<CUresult (*)(int*, CUdevice_attribute, CUdevice)>(function);
  int can = 0;
  const CUresult told = get_attribute(&can, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                                      static_cast<CUdevice>(device));
  return told == CUDA_SUCCESS && can != 0;
}

bool can_map_memory_of_all() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  for (int device = 0; device < devices; ++device) {
    if (!can_map_memory(device)) return false;
  }
  return true;
}

}  // namespace

void prefer_expandable_segments() {
  if (is_set_by_user() || !can_map_memory_of_all()) return;
  c10::CachingAllocator::setAllocatorSettings("expandable_segments:True");
}

bool uses_expandable_segments() {
  return AcceleratorAllocatorConfig::use_expandable_segments();
}

}  // namespace zeropage::memory
