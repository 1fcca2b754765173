// `survive()` for a rank whose launcher is known.
//
// Threads: the rank's one. Throws: what the loop throws, where no launcher starts the rank again, and what Membership throws.
#pragma once

#include <functional>

#include "comm/membership.h"
#include "zeropage/survive.h"

namespace zeropage::saving {

class SurvivingLoop {
 public:
  using Function = std::function<void(comm::World&, SurvivingRun&)>;

  // Calls `loop` until it has returned on all ranks. membership: null where no rank is started again.
  static void run(comm::Membership* membership, const Function& loop,
                  const SurvivalOptions& options);
};

}  // namespace zeropage::saving
