// Smaller scripts with the same fault.
#pragma once

#include <functional>

#include "tests/scripts/script.h"

namespace zeropage::scripts {

// A script without what the fault does not need. is_still: whether a smaller script has the fault.
Script shrunk(Script script, const std::function<bool(const Script&)>& is_still);

// Whether what one rank does alone, if any does, comes before a backward and the step that has to notice it.
bool can_be_noticed(const Script& script);

}  // namespace zeropage::scripts
