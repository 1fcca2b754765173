// The status of a rank, as it writes it to the store for the others.
#pragma once

#include <charconv>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <sstream>
#include <string>

#include "comm/detail/call.h"

namespace zeropage::comm::detail {

// What to do, in errors of ranks that are out of step.
inline constexpr const char* kSameOrder =
    "; all ranks must call the same operations on the same sizes in the same order";

struct RankStatus {
  enum class Where : uint8_t {
    kInCall,     // an operation is under way
    kInTexts,    // the thread that calls waits for other ranks' texts
    kOutside,    // neither: the rank does work of its own
    kOnDevice,   // its device is in an operation, and the thread that calls is in neither
    kLeft,       // it has completed what it began, and has ended
    kElsewhere,  // it waits among other ranks, those of a world that was split from this one
  };

  uint64_t heartbeat =
      0;  // counts up for as long as the rank's process runs, so that silence can be told
  // Collectives that it has begun, this one included. kMayBeginMore: some may be under way to it.
  uint64_t begun = 0;
  // Rounds of texts to which it has given its own; kInTexts: up to that of which it waits for others.
  uint64_t texts = 0;
  // Messages that it has sent, by the rank to which.
  std::map<int, uint64_t> sent;
  Where where = Where::kInCall;
  int64_t since_ms = 0;  // that it has been there
  Call call;             // kInCall, kOnDevice
  std::string
      words;  // kInTexts, kElsewhere: what they are about; kOutside: the last call, "" if there was none
  std::string account;  // not empty: the rank is about to end with these words

  static constexpr uint64_t kMayBeginMore = std::numeric_limits<uint64_t>::max();

  bool is_outside() const { return where == Where::kOutside; }
  bool is_in_operation() const { return where == Where::kInCall || where == Where::kOnDevice; }
  // Whether it left after that operation, so that nothing of the operation is missing.
  bool has_left_after(const Call& collective) const {
    return where == Where::kLeft && collective.operation != Operation::kPair &&
           begun > collective.sequence;
  }

  std::string to_text() const {
    std::ostringstream text;
    text << heartbeat << kSeparator << begun << kSeparator << texts << kSeparator;
    for (const auto& [peer, count] : sent) text << peer << ':' << count << ' ';
    text << kSeparator << static_cast<int>(where) << kSeparator << since_ms << kSeparator
         << static_cast<int>(call.operation) << kSeparator << call.sequence << kSeparator
         << call.bytes << kSeparator << call.peer << kSeparator << static_cast<int>(call.end)
         << kSeparator << call.peer_name << kSeparator << call.what << kSeparator << words
         << kSeparator << account;
    return text.str();
  }

  // Nothing for a rank that has not written yet.
  static std::optional<RankStatus> parse(const std::string& text) {
    std::istringstream in(text);
    const auto next = [&in] {
      std::string part;
      std::getline(in, part, kSeparator);
      return part;
    };
    const auto read = [&next](auto& value) {
      const std::string part = next();
      std::from_chars(part.data(), part.data() + part.size(), value);
    };
    const auto number = [&read] {
      int value = 0;
      read(value);
      return value;
    };
    if (text.empty()) return std::nullopt;
    RankStatus status;
    read(status.heartbeat);
    read(status.begun);
    read(status.texts);
    std::istringstream sent(next());
    char colon = 0;
    uint64_t count = 0;
    for (int peer = 0; sent >> peer >> colon >> count;) status.sent[peer] = count;
    status.where = static_cast<Where>(number());
    read(status.since_ms);
    status.call.operation = static_cast<Operation>(number());
    read(status.call.sequence);
    read(status.call.bytes);
    read(status.call.peer);
    status.call.end = static_cast<Call::End>(number());
    read(status.call.peer_name);
    status.call.what = next();
    status.words = next();
    status.account = next();
    return status;
  }

 private:
  static constexpr char kSeparator = '\x1f';
};

// Whether two ranks that stand so wait for each other for ever. False where one may merely be slow.
// broadcasts_wait: a broadcast and what else has a root, as all other collectives, does not end without every rank.
inline bool never_meet(int rank, const RankStatus& ours, int other, const RankStatus& theirs,
                       bool broadcasts_wait = false) {
  using Where = RankStatus::Where;
  if (ours.is_outside() || theirs.is_outside()) return false;
  // It may come once that has ended.
  if (ours.where == Where::kElsewhere || theirs.where == Where::kElsewhere) return false;
  if (ours.where == Where::kOnDevice || theirs.where == Where::kOnDevice) {
    // A device's operations are counted apart, and its pairs need not be in order with the others.
    return ours.where == theirs.where && ours.call.sequence == theirs.call.sequence &&
           ours.call.operation != Operation::kPair && theirs.call.operation != Operation::kPair &&
           ours.call.tag(0) != theirs.call.tag(0);
  }
  const auto needs_all = [broadcasts_wait](const RankStatus& status) {
    return broadcasts_wait || !may_end_early(status.call.operation);
  };
  const bool we_are_two = ours.call.operation == Operation::kPair;
  const bool they_are_two = theirs.call.operation == Operation::kPair;
  if (ours.where == Where::kInTexts || theirs.where == Where::kInTexts) {
    if (ours.where == theirs.where) return false;
    // Who waits for texts begins no collective before they have come.
    const RankStatus& in_texts = ours.where == Where::kInTexts ? ours : theirs;
    const RankStatus& in_call = ours.where == Where::kInTexts ? theirs : ours;
    // Who is in the call has given its text already: what is still read comes.
    if (in_call.texts >= in_texts.texts) return false;
    return in_call.call.operation != Operation::kPair && needs_all(in_call) &&
           in_texts.begun <= in_call.call.sequence;
  }
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
  const RankStatus& pair = we_are_two ? ours : theirs;
  const RankStatus& collective = we_are_two ? theirs : ours;
  // The message has been sent, and is under way.
  const auto sent = collective.sent.find(we_are_two ? rank : other);
  if (pair.call.end == Call::End::kReceives && sent != collective.sent.end() &&
      sent->second > pair.call.sequence) {
    return false;
  }
  return pair.call.peer == (we_are_two ? other : rank) && needs_all(collective) &&
         pair.begun <= collective.call.sequence;
}

}  // namespace zeropage::comm::detail
