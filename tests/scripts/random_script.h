// A random script: what a user's might be, within what is right or refused.
#pragma once

#include <cstdint>

#include "tests/scripts/script.h"

namespace zeropage::scripts {

// The same for a seed everywhere.
Script random_script(uint64_t seed);

}  // namespace zeropage::scripts
