#include "device/named_range.h"

#include "device/detail/nvtx.h"

namespace zeropage::memory {

NamedRange::NamedRange(const char* name) : for_sink_(Span::What::kRange, name) {
  nvtx::push(name);
  if (for_libtorch_.isActive()) for_libtorch_.before(name);
}

NamedRange::~NamedRange() {
  nvtx::pop();
}

}  // namespace zeropage::memory
