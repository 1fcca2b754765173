// A rank that cannot go on although no operation of its own has failed.
#pragma once

#include <string>

#include "comm/world.h"

namespace zeropage::comm {

// Whoever waits for this rank, in this world or in one that is related to it by World::split, ends with that cause within
// two seconds, and so does what this rank begins in them from here on. Nothing where there are no other ranks. Threads: the one that
// calls the world.
void fail(const World& world, const std::string& why);

}  // namespace zeropage::comm
