#include "comm/failure.h"

#include <exception>

#include "comm/watch/watch.h"
#include "zeropage/ledger.h"

namespace zeropage::comm {
namespace {

void fail(detail::Watch& watch, const std::string& why) {
  const detail::FailureReason account{.cause = why, .call = ""};
  watch.fail_with(account);
  watch.fail_group(account);
  watch.wait_until_announced();
}

}  // namespace

void fail(const World& world, const std::string& why) {
  if (const auto watch = world.communicator().watch()) fail(*watch, why);
}

void detail::tell_of_shortage(Watch& watch, int name) {
  try {
    const std::string words = memory::Ledger::current()->shortage();
    if (!words.empty()) fail(watch, c10::str("rank ", name, " ran out of memory: ", words));
  } catch (const std::exception&) {
    // Without a store the others hear less.
  }
}

}  // namespace zeropage::comm
