// The measurements as people read them.
#pragma once

#include <ostream>
#include <vector>

#include "bench/collectives/figures.h"
#include "bench/collectives/machine.h"
#include "bench/collectives/run.h"
#include "bench/collectives/verdicts.h"

namespace collectives {

void print_machine(std::ostream& out, const Machine& machine, const Flags& flags);
// What follows is of so many ranks; the transports that are absent, and why.
void print_heading(std::ostream& out, const Run& run);
// One case over all transports.
void print_row(std::ostream& out, const std::vector<Measurement>& row);
// Every figure that decides a claim, then the claim.
void print_verdicts(std::ostream& out, const std::vector<Verdict>& verdicts);

}  // namespace collectives
