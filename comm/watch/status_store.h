// The statuses of ranks in the store.
//
// Every rank has a key, and one more key has who asked last. A rank that nobody asks writes nothing.
//
// Threads: one at a time; find() on any. A store that does not answer is given up after a while.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/watch/rank_status.h"

namespace zeropage::comm::detail {

class StatusStore {
 public:
  // Writes this rank's keys: once all ranks have one, all may look. store: of these ranks alone, over a connection on which nobody waits
  // long.
  StatusStore(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
              std::chrono::milliseconds deadline);

  // The beat of what these write is the next one.
  void tell(RankStatus ours);
  // tell(), if another rank has asked since the last time.
  void answer(RankStatus ours);
  // tell(), asks the others, and returns what all have written, by rank. Nothing without an answer.
  std::optional<std::vector<std::string>> exchange(RankStatus ours);
  // What these ranks have written. Nothing without an answer.
  std::optional<std::vector<std::string>> read(const std::vector<int>& ranks) const;
  // The same for one that may never have written. "" where it has not.
  std::string find(int rank) const;

 private:
  // One question at a time, of which one at most is left behind, however long the store says nothing. Shared with that one.
  class Turns;

  std::optional<std::string> ask(std::function<std::string()> question) const;
  const std::string& own_key() const { return keys_[static_cast<size_t>(rank_)]; }

  // Constant after construction.
  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const std::chrono::milliseconds limit_;
  const std::shared_ptr<Turns> turns_;
  std::vector<std::string> keys_;  // by rank

  uint64_t heartbeat_ = 0;
  std::string asked_;  // what was last seen of who asks
};

}  // namespace zeropage::comm::detail
