// What a rank holds while somebody looks: its bytes by account and kind, who allocated the blocks that live,
// and which pages are whole. Not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "zeropage/event_sink.h"
#include "zeropage/ledger.h"
#include "zeropage/profile.h"

namespace zeropage::profile::detail {

class HeldBlocks {
 public:
  using ByAccount = std::array<memory::Breakdown, memory::kAccountCount>;

  // The owner of a block that is being allocated.
  struct Owner {
    NameIndex name = 0;
    NameIndex page = 0;
  };

  // Counts from what the ledger has now, which must not change meanwhile.
  void begin(const ByAccount& now) { now_ = now; }
  // What has changed since the last begin(), until which `now` does not count.
  const ByAccount& now() const { return now_; }
  int64_t events() const { return events_; }

  // Completes the change: its owner, page and block, where it is not an allocation.
  Change follow(const memory::LedgerEvent& event, const Owner& owner);
  void follow(memory::PageChange change, NameIndex page);

  std::vector<Holding> holdings() const;
  std::vector<NameIndex> resident_pages() const;

 private:
  struct Block {
    uint64_t number;
    uint8_t account;
    uint8_t kind;
    int64_t bytes;
    Owner owner;
  };

  ByAccount now_{};
  int64_t events_ = 0;
  uint64_t next_number_ = 1;
  std::unordered_map<const void*, Block> blocks_;
  std::map<NameIndex, bool> is_resident_;
};

}  // namespace zeropage::profile::detail
