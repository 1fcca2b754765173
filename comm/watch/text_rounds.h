// Texts that ranks give each other through the store, round by round.
//
// Rank 0 reads the texts of all and writes one answer, which the others read. So a round costs each rank a few requests to the store,
// however many ranks there are; rank 0 asks for all texts at once. While somebody is late a rank looks up to ten times a second, and rank 0 asks
// 2 log2(N) questions to find out who. Any length: a long text goes in pieces, as a store takes a few megabytes at a time. What a round
// wrote is gone from the store once all have read it: each rank removes its own, and the last reader the answer.
//
// Lifetime: what Options name must outlive it.
// Threads: one at a time. All ranks call the same in the same order.
// Throws: c10::Error with the topic and who is missing: lost, out of step, silent for the deadline, or
// busy for the busy limit (comm/watch/watch.h).
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/watch/watch.h"

namespace zeropage::comm::detail {

// "lost rank 1, 2; ..."
std::string were_lost(const std::vector<int>& ranks);

class TextRounds {
 public:
  struct Options {
    c10::intrusive_ptr<c10d::Store> store;
    int rank = 0;
    int size = 1;
    int store_server = -1;  // the rank whose process serves the store; -1: none of them
    // What it is called, also where it is none of these ranks; -1: no rank of the world serves the store.
    int store_server_name = -1;
    RankNames names;
    bool fails_kin = true;  // whether this rank's other worlds end where a text does not come
    std::string where;      // these ranks meet, for words: " along \"data\""
    std::chrono::milliseconds deadline{};
    std::shared_ptr<Watch> watch;
    // What ranks are called that nobody needs to wait for any longer.
    std::function<std::vector<int>()> lost_ranks;
    // Whether the ranks' launcher has told all of them that this world has ended. Empty: it tells nothing.
    std::function<bool()> has_ended = {};
  };
  using Decide = std::function<std::string(const std::vector<std::string>& texts)>;

  explicit TextRounds(Options options) : options_(std::move(options)) {}

  // Every rank's text, by rank.
  std::vector<std::string> gather(const std::string& topic, const std::string& text);
  // What rank 0 makes of every rank's text.
  std::string settle(const std::string& topic, const std::string& text, const Decide& decide);
  // The same where texts differ, and "" where all are the same, for which their hashes alone are compared.
  std::string settle_difference(const std::string& topic, const std::string& text,
                                const Decide& decide);
  // Before the rank that serves the store ends: returns once the others have read the last round, or after
  // five seconds.
  void wait_for_readers();
  // A number that is the same on all ranks and never comes again.
  uint64_t next_round() { return rounds_++; }

  // The short text under a key; nothing if it does not come within `limit`.
  std::optional<std::string> read(const std::string& key, std::chrono::milliseconds limit);
  bool has_lost_store() const;

 private:
  class Waiting;

  // round: under which the store has what is written in it.
  std::string answer_of(const std::string& round, const std::string& topic, const std::string& text,
                        const Decide& decide);
  std::string decide_for_all(const std::string& round, const std::string& topic,
                             const std::string& text, const Decide& decide);
  std::string ask_for_answer(const std::string& round, const std::string& topic,
                             const std::string& text);
  std::vector<int> collect(const std::string& round, Waiting& waiting,
                           std::vector<std::string>& texts);
  std::optional<std::vector<std::string>> read_heads(const std::vector<std::string>& keys,
                                                     Waiting& waiting);
  std::vector<int> find_absent(const std::vector<std::string>& keys, size_t most);
  std::string why_missing(const std::vector<int>& missing, const Waiting& waiting) const;
  std::string fail(const std::string& topic, const std::vector<int>& missing,
                   const Waiting& waiting) const;

  void write_text(const std::string& key, const std::string& text);
  std::optional<std::string> read_text(const std::string& key, std::chrono::milliseconds limit);
  std::optional<std::string> text_behind(const std::string& head, const std::string& key);
  int64_t count_readers(const std::string& round, int64_t more);
  void leave_round(const std::string& round, size_t own_bytes, size_t answer_bytes);
  void wait_until_read(const std::string& round, int64_t readers);
  void wait_until_gone(const std::string& key);
  void leave_sooner_without_ranks(std::chrono::steady_clock::time_point& leave_at);

  const Options options_;
  bool store_is_gone_ = false;
  uint64_t rounds_ = 0;
  // A key of the last round that came to its end here. It is gone once all ranks have read that round.
  std::string last_key_;
};

}  // namespace zeropage::comm::detail
