#include "device/named_range.h"

#include "device/detail/nvtx.h"

namespace zeropage::device {

NamedRange::NamedRange(const char* name) : for_sink_(memory::Span::What::kRange, name) {
  device::nvtx::push(name);
  if (for_libtorch_.isActive()) for_libtorch_.before(name);
}

NamedRange::~NamedRange() {
  device::nvtx::pop();
}

}  // namespace zeropage::device
