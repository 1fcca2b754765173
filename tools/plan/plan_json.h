// A plan as JSON: bytes, FLOPs.
#pragma once

#include <nlohmann/json.hpp>

#include "zeropage/plan.h"

namespace zeropage::tools {

nlohmann::json to_json(const Plan& plan);

}  // namespace zeropage::tools
