#include "device/device_places.h"

#include "device/topology.h"

namespace zeropage::device {

std::vector<int> device_nodes_of_ranks(int ranks) {
  std::vector<int> by_device;
  for (const DevicePlace& place : cuda_device_places()) {
    by_device.push_back(Machine::here().node_of_pci(place.pci_bus_id));
  }
  std::vector<int> by_rank;
  if (by_device.empty()) return by_rank;
  for (size_t rank = 0; static_cast<int>(rank) < ranks; ++rank) {
    by_rank.push_back(by_device[rank % by_device.size()]);
  }
  return by_rank;
}

}  // namespace zeropage::device
