// A rank that ends although no operation of its own has failed: the others hear why.
#pragma once

#include <string>

#include "comm/watch/watch.h"

namespace zeropage::comm::detail {

// Ranks that wait for this one, and what it begins, end with that cause. Threads: the one that calls the world.
void fail(Watch& watch, const std::string& why);

// The same for a rank that ends because memory ran out, as the calling thread's ledger says; else it does nothing. The others
// would only hear that the rank is lost. name: what the rank is called. Throws nothing.
void tell_of_shortage(Watch& watch, int name);

}  // namespace zeropage::comm::detail
