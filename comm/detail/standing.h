// Where a rank stands that has waited long in one operation, as it tells the others in the store.
#pragma once

#include <charconv>
#include <optional>
#include <sstream>
#include <string>

#include "comm/detail/call.h"

namespace zeropage::comm::detail {

struct Standing {
  uint64_t beat = 0;   // counts up for as long as the rank waits, so that silence can be told
  uint64_t begun = 0;  // collectives that it has begun, this one included
  Call call;
  std::string account;  // not empty: the rank is about to end with these words

  std::string to_text() const {
    std::ostringstream text;
    text << beat << kSeparator << begun << kSeparator << static_cast<int>(call.operation)
         << kSeparator << call.sequence << kSeparator << call.bytes << kSeparator << call.peer
         << kSeparator << static_cast<int>(call.end) << kSeparator << call.what << kSeparator
         << account;
    return text.str();
  }

  // Nothing for a rank that has not written yet.
  static std::optional<Standing> parse(const std::string& text) {
    std::istringstream in(text);
    const auto next = [&in] {
      std::string part;
      std::getline(in, part, kSeparator);
      return part;
    };
    const auto number = [&next] {
      const std::string part = next();
      int64_t value = 0;
      std::from_chars(part.data(), part.data() + part.size(), value);
      return value;
    };
    if (text.empty()) return std::nullopt;
    Standing standing;
    standing.beat = static_cast<uint64_t>(number());
    standing.begun = static_cast<uint64_t>(number());
    standing.call.operation = static_cast<Operation>(number());
    standing.call.sequence = static_cast<uint64_t>(number());
    standing.call.bytes = number();
    standing.call.peer = static_cast<int>(number());
    standing.call.end = static_cast<Call::End>(number());
    standing.call.what = next();
    standing.account = next();
    return standing;
  }

 private:
  static constexpr char kSeparator = '\x1f';
};

// Whether two ranks that stand so wait for each other for ever. False where one may merely be slow.
// broadcasts_wait: a broadcast, as all other collectives, does not end without every rank.
inline bool never_meet(int rank, const Standing& ours, int other, const Standing& theirs,
                       bool broadcasts_wait = false) {
  const bool we_are_two = ours.call.operation == Operation::kPair;
  const bool they_are_two = theirs.call.operation == Operation::kPair;
  if (!we_are_two && !they_are_two) {
    return ours.call.sequence == theirs.call.sequence && ours.call.tag(0) != theirs.call.tag(0);
  }
  if (we_are_two && they_are_two) {
    if (ours.call.peer != other || theirs.call.peer != rank) return false;
    // Two that receive may have a message under way; two that send have not.
    if (ours.call.end == theirs.call.end) return ours.call.end == Call::End::kSends;
    return ours.call.sequence == theirs.call.sequence && ours.call.bytes != theirs.call.bytes;
  }
  // One of the two is in a collective instead.
  const Standing& pair = we_are_two ? ours : theirs;
  const Standing& collective = we_are_two ? theirs : ours;
  return pair.call.peer == (we_are_two ? other : rank) &&
         (broadcasts_wait || collective.call.operation != Operation::kBroadcast) &&
         pair.begun <= collective.call.sequence;
}

}  // namespace zeropage::comm::detail
