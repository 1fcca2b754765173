// A script by this library: its ranks are threads, and where it resumes, they end and others begin.
#pragma once

#include <string>

#include "tests/scripts/side.h"

namespace zeropage::scripts {

struct OurRun {
  // What rank 0 saw.
  Observations seen;
  // The first rank's that threw, and empty where none did.
  std::string error;
};

// folder: an empty one, for states.
OurRun run_ours(const Script& script, const std::string& folder);

}  // namespace zeropage::scripts
