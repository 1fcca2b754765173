// The last changes of a ledger, as an error about memory tells them: who took and freed bytes of which kind.
//
// Changes that follow each other and are of the same account, kind and owner are one line, so that a loop over
// small tensors does not hide what was before it.
//
// Not thread-safe: the ledger's mutex guards it. Allocates nothing but what describe() returns.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "zeropage/event_sink.h"
#include "zeropage/ledger.h"

namespace zeropage::memory {

class LastEvents {
 public:
  static constexpr size_t kKept = 8;

  // bytes: taken, or less than 0 where they were freed.
  void note(Account account, Kind kind, int64_t bytes, const OwnerScope::Owner& owner);
  // A line for each, the newest last; "" where nothing has changed.
  std::string describe() const;

 private:
  struct Sum {
    int64_t count = 0;
    int64_t bytes = 0;
  };
  struct Event {
    Account account;
    Kind kind;
    const char* owner = "";
    // Names of pages do not outlive their pages. What is longer is cut off.
    std::array<char, 48> page{};
    Sum taken, freed;

    bool is_of(Account of_account, Kind of_kind, const OwnerScope::Owner& of_owner) const;
  };

  std::array<Event, kKept> events_;  // the newest is at (noted_ - 1) % kKept
  size_t noted_ = 0;
};

}  // namespace zeropage::memory
