// A run without values: what every rank would send and hold, for more ranks than there are
// machines.
#pragma once

#include "bench/train_gpt/flags.h"

namespace train_gpt {

// Runs flags.steps steps of one rank after the other, of all up to 16 ranks, else of the first and
// the last; prints a table and writes the JSON. Throws if the file cannot be written.
void simulate(const Flags& flags);

}  // namespace train_gpt
