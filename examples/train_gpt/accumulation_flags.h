// The flags about micro-batches, precision and the gradient's norm.
#pragma once

#include "examples/train_gpt/flags.h"

namespace CLI {
class App;
}  // namespace CLI

namespace train_gpt {

void add_accumulation(CLI::App& app, Flags& flags);

// Throws CLI::ValidationError for values that make no sense, or none together.
void check_accumulation(const Flags& flags);

}  // namespace train_gpt
