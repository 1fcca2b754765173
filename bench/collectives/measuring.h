// One run of Google Benchmark on rank 0 with the other ranks beside it.
#pragma once

#include <functional>
#include <vector>

#include "bench/collectives/figures.h"
#include "bench/collectives/flags.h"
#include "bench/collectives/team.h"

namespace collectives {

// Of rank 0, once a process, while the others follow(). `finished` gets the measurements of a case,
// one a transport, when its last round has ended.
void measure(Team& team, const Flags& flags,
             const std::function<void(const std::vector<Measurement>&)>& finished);

}  // namespace collectives
