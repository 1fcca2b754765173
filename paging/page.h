// A page: bytes that are brought and dropped together.
//
// The life of a page, checked at every transition:
//
//   kEvicted  --begin_fetch--> kFetching --finish_fetch--> kClean --mark_dirty--> kDirty
//   kClean    --evict--------> kEvicted
//   kDirty    --mark_clean---> kClean
//   kFetching --abandon_fetch--> kEvicted
//
// Threads: guarded by its pager's mutex.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "paging/page_source.h"
#include "paging/page_storages.h"
#include "paging/page_users.h"
#include "zeropage/detail/pending.h"

namespace zeropage::paging {

class Page {
 public:
  enum class State : uint8_t { kEvicted, kFetching, kClean, kDirty };
  using StorageInPage = PageStorage;

  // bytes: held while the page is not evicted.
  Page(std::string name, int64_t bytes, std::vector<StorageInPage> page_storages);

  const std::string& name() const { return name_; }
  int64_t bytes() const { return bytes_; }
  State state() const { return state_; }
  bool resident() const { return state_ == State::kClean || state_ == State::kDirty; }
  const memory::Pending& arrival() const { return fetch_.arrival; }
  const at::Tensor& buffer() const { return fetch_.buffer; }
  PageStorages& page_storages() { return page_storages_; }

  void begin_fetch(Fetch fetch);
  void finish_fetch();
  void abandon_fetch();  // it ended with an error
  void mark_dirty();
  void mark_clean();
  void evict();

  // Kept by the pager.
  PageUsers users;
  int64_t last_touch = 0;         // a clock that ticks with every touch
  bool prefetched = false;        // brought before anything asked for it, and not touched since
  bool fetched_by_guard = false;  // brought by a guard, and not touched outside of guards since
  bool failed = false;  // its fetch ended with an error, of which all who pinned it are told

 private:
  void move_to(State from, State to);

  // Constant after construction.
  const std::string name_;
  const int64_t bytes_;

  State state_ = State::kEvicted;
  Fetch fetch_;
  PageStorages page_storages_;  // leave the fetch's buffer before it goes
};

// "clean", for messages.
const char* name(Page::State state);

}  // namespace zeropage::paging
