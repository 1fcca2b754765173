// Runs and verdicts as JSON.
#pragma once

#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "bench/collectives/machine.h"
#include "bench/collectives/run.h"
#include "bench/collectives/verdicts.h"

namespace collectives {

// Without ratios, which follow from the rest; run_from_json is its inverse.
nlohmann::json to_json(const Run& run);
Run run_from_json(const nlohmann::json& json);

// Everything: machine, flags, measurements with ratios, verdicts. Seconds, bytes, bytes a second.
nlohmann::json document(const Machine& machine, const Flags& flags, const std::vector<Run>& runs,
                        const std::vector<Verdict>& verdicts);

}  // namespace collectives
