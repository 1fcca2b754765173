#include "comm/failure.h"

#include "comm/watch/rank_failure.h"

namespace zeropage::comm {

void fail(const World& world, const std::string& why) {
  if (const auto watch = world.communicator().watch()) detail::fail(*watch, why);
}

}  // namespace zeropage::comm
