// One rank's run from building the model to the report.
#pragma once

#include "bench/train_gpt/flags.h"
#include "bench/train_gpt/text_data.h"
#include "zeropage/zeropage.h"

namespace train_gpt {

void train(zeropage::comm::World& world, const Flags& flags, const TextData& data);

}  // namespace train_gpt
