// Why a rank failed, as the others read it: first the cause, then in which of its calls. A rank that fails because
// of another passes that cause on, so that every error begins with what happened first.
#pragma once

#include <string>

#include <c10/util/StringUtil.h>

namespace zeropage::comm::detail {

struct FailureReason {
  std::string cause;
  std::string call;  // empty: not known

  // all_reduce #3 of page "a" (4.0 KiB): lost rank 2 (...)
  std::string words() const { return call.empty() ? cause : c10::str(call, ": ", cause); }
  // The cause for a rank that fails because `rank` left this account.
  std::string as_cause_of(int rank) const {
    return c10::str(cause, ". Rank ", rank, " had failed of it",
                    call.empty() ? std::string() : " in " + call);
  }

  std::string to_text() const { return cause + kSeparator + call; }
  static FailureReason parse(const std::string& text) {
    const size_t end = text.find(kSeparator);
    if (end == std::string::npos) return {text, ""};
    return {text.substr(0, end), text.substr(end + 1)};
  }

 private:
  static constexpr char kSeparator = '\x1d';
};

}  // namespace zeropage::comm::detail
