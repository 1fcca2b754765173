// A page: bytes that are brought and dropped together, and the storages that live in them.
//
// The life of a page, checked at every transition:
//
//   kEvicted  --begin_fetch--> kFetching --finish_fetch--> kClean --mark_dirty--> kDirty
//   kClean    --evict--------> kEvicted
//   kDirty    --mark_clean---> kClean
//   kFetching --abandon_fetch--> kEvicted
//
// While a page is neither clean nor dirty, its storages have a null data pointer and keep their
// size, because view operators check their bounds against it: such a tensor can be viewed, split and
// transposed. What reads storages past the dispatcher (torch::save) is refused by LibTorch, because
// an evicted storage says that it lies on the meta device; while an operator makes a view of it,
// which takes over the storage's device, it does not say so.
//
// Threads: guarded by its pager's mutex.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>

#include "device/pending.h"

namespace zeropage::memory {

class Pager;

// A page's bytes on their way: valid once `arrival` has ended.
struct Fetch {
  at::Tensor buffer;  // 1-D, contiguous, of the page's dtype
  Pending arrival;
};

class Page {
 public:
  enum class State : uint8_t { kEvicted, kFetching, kClean, kDirty };

  // A storage in the page, from byte `offset_bytes` on.
  struct Tenant {
    c10::Storage storage;
    int64_t offset_bytes = 0;
  };

  // bytes: held while the page is not evicted.
  Page(std::string name, int64_t bytes, std::vector<Tenant> tenants);
  ~Page();
  Page(const Page&) = delete;
  Page& operator=(const Page&) = delete;

  // Ties the tenants to their pager, by which the trap finds them, and evicts them: what memory they
  // had is let go.
  void join(const std::weak_ptr<Pager>& pager, size_t index);

  const std::string& name() const { return name_; }
  int64_t bytes() const { return bytes_; }
  State state() const { return state_; }
  bool resident() const { return state_ == State::kClean || state_ == State::kDirty; }
  const Pending& arrival() const { return fetch_.arrival; }
  const at::Tensor& buffer() const { return fetch_.buffer; }

  void begin_fetch(Fetch fetch);
  void finish_fetch();
  void abandon_fetch();  // it ended with an error
  void mark_dirty();
  void mark_clean();
  void evict();
  void begin_view();
  void end_view();

  // Kept by the pager.
  int pins = 0;
  int64_t last_touch = 0;   // a clock that ticks with every touch
  bool prefetched = false;  // brought before anything asked for it, and not touched since
  int aside_pins = 0;       // of `pins`, those of guards
  int aside_writes = 0;     // of them, those of guards under which is written
  bool aside = false;       // brought by a guard, and not touched outside of guards since
  bool failed = false;      // its fetch ended with an error, of which all who pinned it are told

 private:
  void move_to(State from, State to);
  void point_tenants();

  // Constant after construction.
  const std::string name_;
  const int64_t bytes_;
  std::vector<Tenant> tenants_;

  State state_ = State::kEvicted;
  Fetch fetch_;
  int views_ = 0;  // operators that are making a view
};

// "clean", for messages.
const char* name(Page::State state);

// Which page a storage lives in.
struct PageAddress {
  std::shared_ptr<Pager> pager;  // null: the page's pager is gone, and with it the bytes
  size_t page = 0;
};

// False for a storage that no pager keeps.
bool is_paged(const c10::StorageImpl& storage);
// REQUIRES: is_paged(storage).
PageAddress address_of(const c10::StorageImpl& storage);

}  // namespace zeropage::memory
