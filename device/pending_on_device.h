// The part of a Pending that an accelerator works at: what makes one names it.
#pragma once

#include <functional>

#include "device/stream.h"
#include "zeropage/detail/pending.h"

namespace zeropage::memory {

struct Pending::OnDevice {
  c10::Device device;
  device::Event end;  // recorded before the part on the host has ended
  // Throws what went wrong on the device, once that is known. May be empty.
  std::function<void()> check;
};

}  // namespace zeropage::memory
