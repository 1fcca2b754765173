// A rank that cannot go on although no operation of its own has failed.
#pragma once

#include <string>

#include "zeropage/world.h"

namespace zeropage::comm {

// Makes this rank fail: ranks that wait for it, in this world or in one that is related to it by World::split, end
// with that cause within two seconds, and so does what this rank begins there from now on. Does nothing in a world
// of one. Threads: the one that
// calls the world.
void fail(const World& world, const std::string& why);

}  // namespace zeropage::comm
