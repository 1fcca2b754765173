// What train_gpt refuses of a command line whose flags are right one by one.
#pragma once

#include "bench/train_gpt/flags.h"

namespace CLI {
class App;
}

namespace train_gpt {

// Throws for values that make no sense, or none together, and under a launcher or in a simulation.
void check_flags(const CLI::App& app, const Flags& flags);

}  // namespace train_gpt
