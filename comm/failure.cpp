#include "comm/failure.h"

#include "comm/watch/watch.h"

namespace zeropage::comm {

void fail(const World& world, const std::string& why) {
  const auto watch = world.communicator().watch();
  if (!watch) return;
  const detail::FailureReason account{.cause = why, .call = ""};
  watch->fail_with(account);
  watch->fail_group(account);
  watch->wait_until_announced();
}

}  // namespace zeropage::comm
