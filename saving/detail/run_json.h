// What a run goes on from beside its tensors, as the manifest has it.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "zeropage/saving.h"

namespace zeropage::saving {

// samples, loss_scaler, norm_spikes, scheduler, values and extras, as far as the run has them.
nlohmann::json progress_json(const RunState& run);
// Extras that the run has and the state lacks, and the other way round.
void match_extras(const nlohmann::json& progress, const RunState& run, LoadReport& report);
// Gives it back. What the run has no place for stays where it is.
void take_over(const nlohmann::json& progress, RunState& run);

}  // namespace zeropage::saving
