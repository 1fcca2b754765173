// Where in the machine CUDA's devices are. A build without CUDA has none:
// device/no_cuda_devices.cpp.
//
// Asks CUDA, so a process that did cannot fork ranks (device/accelerator_driver.h). Free of torch, for `zp`.
#pragma once

#include <string>
#include <vector>

namespace zeropage::device {

struct DevicePlace {
  std::string name;        // "NVIDIA H200"
  std::string pci_bus_id;  // "0000:3b:00.0"
};

// The places, by CUDA's index. Empty where no device works.
std::vector<DevicePlace> cuda_device_places();

// For Machine::core_sets: by local rank the node nearest its device, where rank r has device
// r modulo their number; empty where there is none.
std::vector<int> device_nodes_of_ranks(int ranks);

}  // namespace zeropage::device
