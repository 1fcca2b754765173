#include <array>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime_api.h>
#include <filesystem>
#include <string>

#include "device/accelerator_driver.h"
#include "device/detail/cuda_device.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"

namespace zeropage::device::cuda {
namespace {

void check(cudaError_t result, int index, const char* what) {
  ZP_CHECK(result == cudaSuccess, "cuda:", index, ": CUDA does not tell ", what, ": ",
           cudaGetErrorString(result), "; see nvidia-smi");
}

cudaDeviceProp properties(int index) {
  cudaDeviceProp found{};
  check(cudaGetDeviceProperties(&found, index), index, "its properties");
  return found;
}

// CUDA counts 13.0 as 13000.
std::string version(int number) {
  return c10::str(number / 1000, ".", number % 1000 / 10);
}

// The error stays in CUDA's per-thread state, where LibTorch's next check would find it.
cudaError_t count(int* devices) {
  const cudaError_t result = cudaGetDeviceCount(devices);
  if (result != cudaSuccess) cudaGetLastError();
  return result;
}

}  // namespace

int device_count() {
  device::note_driver_use("memory::device_count(cuda)");
  int devices = 0;
  return count(&devices) == cudaSuccess ? devices : 0;
}

std::string why_none() {
  device::note_driver_use("memory::cuda::why_none()");
  int devices = 0;
  const cudaError_t result = count(&devices);
  if (result == cudaSuccess && devices > 0) return "";
  int driver = 0;
  int runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  if (driver == 0) {
    return c10::str("this machine has no CUDA driver; install NVIDIA's, for CUDA ",
                    version(runtime), " or newer, or train on the host");
  }
  if (result == cudaErrorInsufficientDriver) {
    return c10::str("the driver is too old: it is for CUDA ", version(driver),
                    ", and this build needs ", version(runtime), " (", cudaGetErrorString(result),
                    "); install a newer one");
  }
  if (result == cudaSuccess || result == cudaErrorNoDevice) {
    return "this process sees no CUDA device; see nvidia-smi and CUDA_VISIBLE_DEVICES";
  }
  return c10::str("CUDA does not start: ", cudaGetErrorString(result), " (driver for CUDA ",
                  version(driver), ", runtime ", version(runtime), "); see nvidia-smi");
}

std::string uuid(int index) {
  const cudaUUID_t id = properties(index).uuid;
  std::string text = "GPU-";
  for (size_t byte = 0; byte < sizeof(id.bytes); ++byte) {
    std::array<char, 3> digits{};
    std::snprintf(digits.data(), digits.size(), "%02x", static_cast<unsigned char>(id.bytes[byte]));
    if (byte == 4 || byte == 6 || byte == 8 || byte == 10) text += '-';
    text += digits.data();
  }
  return text;
}

std::string name(int index) {
  return properties(index).name;
}

void register_host_memory(void* data, int64_t bytes) {
  const cudaError_t result =
      cudaHostRegister(data, static_cast<size_t>(bytes), cudaHostRegisterPortable);
  // It stays in CUDA's per-thread state, where LibTorch's next check would find it.
  if (result != cudaSuccess) cudaGetLastError();
  ZP_CHECK(result == cudaSuccess, "CUDA does not page-lock ", memory::format_bytes(bytes),
           " of host memory: ", cudaGetErrorString(result),
           "; the host or a limit of its driver has less: use more ranks or machines");
}

void unregister_host_memory(void* data) noexcept {
  // A process that ends has no driver any more.
  if (cudaHostUnregister(data) != cudaSuccess) cudaGetLastError();
}

}  // namespace zeropage::device::cuda

namespace zeropage::memory {

bool has_cuda_driver() {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  const bool hidden = visible != nullptr && (*visible == '\0' || std::string(visible) == "-1");
  return !hidden && std::filesystem::exists("/dev/nvidiactl");
}

}  // namespace zeropage::memory
