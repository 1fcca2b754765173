#include "comm/watch/rank_failure.h"

#include <exception>

#include "zeropage/ledger.h"

namespace zeropage::comm::detail {

void fail(Watch& watch, const std::string& why) {
  const FailureReason account{.cause = why, .call = ""};
  watch.fail_with(account);
  watch.fail_group(account);
  watch.wait_until_announced();
}

void tell_of_shortage(Watch& watch, int name) {
  try {
    const std::string words = memory::Ledger::current()->shortage();
    if (!words.empty()) fail(watch, c10::str("rank ", name, " ran out of memory: ", words));
  } catch (const std::exception&) {
    // Without a store the others hear less.
  }
}

}  // namespace zeropage::comm::detail
