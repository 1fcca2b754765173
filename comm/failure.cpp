#include "comm/failure.h"

#include "comm/detail/watch.h"

namespace zeropage::comm {

void fail(const World& world, const std::string& why) {
  const auto watch = world.communicator().watch();
  if (!watch) return;
  const detail::Account account{.cause = why, .call = ""};
  watch->condemn(account);
  watch->tell_kin(account);
  watch->wait_until_told();
}

}  // namespace zeropage::comm
