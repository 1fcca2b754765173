// A profile as Chrome's trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing show.
//
// A process a rank, with tracks for phases, collectives, copies, waits and each page, and the bytes of each
// kind as counters. Steps follow each other without the time between them.
#pragma once

#include <string>

#include "zeropage/profile.h"

namespace zeropage::profile {

std::string chrome_trace(const Profile& profile);

}  // namespace zeropage::profile
