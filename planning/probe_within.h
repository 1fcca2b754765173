// What a probe repeats and times.
#pragma once

#include <functional>
#include <string_view>

#include "zeropage/probe.h"

namespace zeropage::planning {

// Called in each repetition, within the time that is taken: tests delay a rank by it.
using WithinProbe = std::function<void(std::string_view what)>;

ProbeReport probe_within(const comm::World& world, const ProbeOptions& options,
                         const WithinProbe& within);

}  // namespace zeropage::planning
