#include "zeropage/profile.h"

namespace zeropage::profile {

const char* name(Change::Phase phase) {
  constexpr const char* kNames[] = {"other", "forward", "backward", "step"};
  return kNames[static_cast<size_t>(phase)];
}

}  // namespace zeropage::profile
