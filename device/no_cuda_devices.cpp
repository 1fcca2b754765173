#include "device/device_places.h"

namespace zeropage::memory {

std::vector<DevicePlace> cuda_device_places() {
  return {};
}

}  // namespace zeropage::memory
