// Devices, streams and events of the fake accelerator as LibTorch asks for them.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace zeropage::testing {

// Lives until the process ends.
const c10::impl::DeviceGuardImplInterface& fake_guard();

// index: -1 for the thread's current device.
c10::DeviceIndex fake_index(c10::DeviceIndex index);

}  // namespace zeropage::testing
