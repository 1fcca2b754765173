// A profile of no rank, with the names of the ledger's kinds and accounts.
#pragma once

#include "zeropage/event_sink.h"
#include "zeropage/ledger.h"
#include "zeropage/profile.h"

namespace zeropage::profile::detail {

inline Profile named_profile() {
  Profile profile;
  for (size_t kind = 0; kind < memory::kKindCount; ++kind) {
    profile.kinds.emplace_back(memory::name(static_cast<memory::Kind>(kind)));
  }
  profile.accounts = {"host", "accelerator", "simulated device", "host tier", "nvme tier"};
  return profile;
}

}  // namespace zeropage::profile::detail
