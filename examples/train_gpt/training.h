// One rank's run from building the model to the report.
#pragma once

#include "examples/train_gpt/flags.h"
#include "examples/train_gpt/text_data.h"
#include "zero/zeropage.h"

namespace train_gpt {

void train(zeropage::comm::World& world, const Flags& flags, const TextData& data);

}  // namespace train_gpt
