// A spread as every --json file has it.
#pragma once

#include <nlohmann/json.hpp>

#include "bench/collectives/figures.h"

namespace collectives {

inline nlohmann::json spread_json(const Spread& spread) {
  return {{"median", spread.median()},
          {"min", spread.least()},
          {"max", spread.most()},
          {"rounds", spread.rounds}};
}

}  // namespace collectives
