#include "device/device_places.h"

#include <array>
#include <cuda_runtime_api.h>

#include "device/accelerator_driver.h"

namespace zeropage::device {

std::vector<DevicePlace> cuda_device_places() {
  note_driver_use("memory::cuda_device_places()");
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    // It stays in CUDA's per-thread state, where LibTorch's next check would find it.
    cudaGetLastError();
    return {};
  }
  std::vector<DevicePlace> places;
  for (int index = 0; index < count; ++index) {
    cudaDeviceProp properties{};
    std::array<char, 32> bus_id{};
    if (cudaGetDeviceProperties(&properties, index) != cudaSuccess ||
        cudaDeviceGetPCIBusId(bus_id.data(), static_cast<int>(bus_id.size()), index) !=
            cudaSuccess) {
      cudaGetLastError();
      return {};
    }
    places.push_back({.name = properties.name, .pci_bus_id = bus_id.data()});
  }
  return places;
}

}  // namespace zeropage::device
