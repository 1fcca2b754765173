#include "tests/harness/allocator_on_host/cuda_runtime_stand_in.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string_view>

// What is declared here is found by libc10_cuda.so.
#pragma GCC visibility push(default)
#include <cuda.h>
#include <cuda_runtime_api.h>
#pragma GCC visibility pop

namespace {

using zeropage::testing::kBytesOfStandIn;

constexpr size_t kPageBytes = size_t{2} << 20;

struct Device {
  size_t used_bytes = 0;
  uintptr_t next_address = uintptr_t{1} << 44;
  std::map<uintptr_t, size_t> allocations;
  int can_map_memory = 1;

  bool take(size_t bytes) {
    if (used_bytes + bytes > kBytesOfStandIn) return false;
    used_bytes += bytes;
    return true;
  }
  uintptr_t addresses(size_t bytes) {
    const uintptr_t begin = next_address;
    next_address += (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
    return begin;
  }
};

Device& device() {
  static Device of_process;
  return of_process;
}

CUresult get_attribute(int* value, CUdevice_attribute attribute, CUdevice /*device*/) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
               ? device().can_map_memory
               : 0;
  return CUDA_SUCCESS;
}

CUresult reserve_addresses(CUdeviceptr* address, size_t bytes, size_t /*alignment*/,
                           CUdeviceptr /*hint*/, unsigned long long /*flags*/) {
  *address = device().addresses(bytes);
  return CUDA_SUCCESS;
}

CUresult free_addresses(CUdeviceptr /*address*/, size_t /*bytes*/) {
  return CUDA_SUCCESS;
}

// The handle is the size, which release_memory() needs.
CUresult create_memory(CUmemGenericAllocationHandle* handle, size_t bytes,
                       const CUmemAllocationProp* /*of*/, unsigned long long /*flags*/) {
  if (!device().take(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = bytes;
  return CUDA_SUCCESS;
}

CUresult release_memory(CUmemGenericAllocationHandle handle) {
  device().used_bytes -= handle;
  return CUDA_SUCCESS;
}

CUresult map_memory(CUdeviceptr /*address*/, size_t /*bytes*/, size_t /*offset*/,
                    CUmemGenericAllocationHandle /*handle*/, unsigned long long /*flags*/) {
  return CUDA_SUCCESS;
}

CUresult unmap_memory(CUdeviceptr /*address*/, size_t /*bytes*/) {
  return CUDA_SUCCESS;
}

CUresult set_access(CUdeviceptr /*address*/, size_t /*bytes*/, const CUmemAccessDesc* /*access*/,
                    size_t /*count*/) {
  return CUDA_SUCCESS;
}

CUresult not_needed() {
  std::fputs("the allocator calls a function of CUDA's driver that the stand-in lacks\n", stderr);
  std::abort();
}

void* driver_function(std::string_view name) {
  if (name == "cuDeviceGetAttribute") return reinterpret_cast<void*>(&get_attribute);
  if (name == "cuMemAddressReserve") return reinterpret_cast<void*>(&reserve_addresses);
  if (name == "cuMemAddressFree") return reinterpret_cast<void*>(&free_addresses);
  if (name == "cuMemCreate") return reinterpret_cast<void*>(&create_memory);
  if (name == "cuMemRelease") return reinterpret_cast<void*>(&release_memory);
  if (name == "cuMemMap") return reinterpret_cast<void*>(&map_memory);
  if (name == "cuMemUnmap") return reinterpret_cast<void*>(&unmap_memory);
  if (name == "cuMemSetAccess") return reinterpret_cast<void*>(&set_access);
  return reinterpret_cast<void*>(&not_needed);
}

}  // namespace

namespace zeropage::testing {

void let_stand_in_map_memory(bool can_map) {
  device().can_map_memory = can_map ? 1 : 0;
}

}  // namespace zeropage::testing

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* index) {
  *index = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int /*index*/) {
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int /*index*/) {
  *properties = cudaDeviceProp();
  properties->totalGlobalMem = kBytesOfStandIn;
  properties->major = 9;
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** address, size_t bytes) {
  if (!device().take(bytes)) return cudaErrorMemoryAllocation;
  const uintptr_t begin = device().addresses(bytes);
  device().allocations[begin] = bytes;
  *address = reinterpret_cast<void*>(begin);
  return cudaSuccess;
}
cudaError_t cudaFree(void* address) {
  const auto known = device().allocations.find(reinterpret_cast<uintptr_t>(address));
  if (known == device().allocations.end()) return cudaErrorInvalidValue;
  device().used_bytes -= known->second;
  device().allocations.erase(known);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = kBytesOfStandIn - device().used_bytes;
  *total = kBytesOfStandIn;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
const char* cudaGetErrorName(cudaError_t /*error*/) {
  return "an error of the stand-in";
}
const char* cudaGetErrorString(cudaError_t /*error*/) {
  return "an error of the stand-in";
}
cudaError_t cudaDeviceSynchronize() {
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t /*stream*/) {
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t /*stream*/, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* /*mode*/) {
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function,
                                             unsigned int /*version*/, unsigned long long /*flags*/,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = driver_function(name);
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

}  // extern "C"
