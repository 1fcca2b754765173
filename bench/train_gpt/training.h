// One rank's run from building the model to the report.
#pragma once

#include "bench/train_gpt/flags.h"
#include "bench/train_gpt/text_data.h"
#include "zeropage/survive.h"
#include "zeropage/zeropage.h"

namespace train_gpt {

// surviving: where the run goes on after a rank has died; null: it does not.
void train(zeropage::comm::World& world, const Flags& flags, const TextData& data,
           zeropage::SurvivingRun* surviving = nullptr);

}  // namespace train_gpt
