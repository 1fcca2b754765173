#include "device/accelerator_driver.h"
#include "device/device_places.h"

namespace zeropage::device {

std::vector<DevicePlace> cuda_device_places() {
  note_driver_question("memory::cuda_device_places()");
  return {};
}

}  // namespace zeropage::device
