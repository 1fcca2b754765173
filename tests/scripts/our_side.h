// A script by this library: its ranks are threads, and where it resumes, they end and others begin.
#pragma once

#include <string>
#include <vector>

#include "tests/scripts/side.h"

namespace zeropage::scripts {

struct OurRun {
  // What the first rank saw; where ranks have stages, the first of each.
  Observations seen;
  // The words of ranks that threw, those that tell most first; empty where none did.
  std::vector<std::string> errors;
};

// folder: an empty one on a disk, for states and what is on NVMe.
OurRun run_ours(const Script& script, const std::string& folder);

// Whether the error says no more than that another rank has ended.
bool is_a_consequence(const std::string& error);

}  // namespace zeropage::scripts
