// The storages that live in a page: where they point, and how one finds its page.
//
// While the page is away, its storages have a null data pointer and keep their size, because view
// operators check their bounds against it: such a tensor can be viewed, split and transposed. What
// reads storages past the dispatcher (torch::save) is refused by LibTorch, because such a storage
// says that it lies on the meta device; while an operator makes a view of it, which takes over the
// storage's device, it does not say so. A view changes its own storage and none beside it, so it costs the
// same however many storages the page has.
//
// Lifetime: shares the storages. When it goes, they stay away for ever.
// Threads: guarded by the pager's mutex. is_paged() and address_of(): any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <c10/core/Storage.h>

namespace zeropage::paging {

class Pager;

// A storage in a page, from byte `offset_bytes` on.
struct PageStorage {
  c10::Storage storage;
  int64_t offset_bytes = 0;
};

class PageStorages {
 public:
  explicit PageStorages(std::vector<PageStorage> page_storages)
      : page_storages_(std::move(page_storages)) {}
  ~PageStorages() { leave(); }
  PageStorages(const PageStorages&) = delete;
  PageStorages& operator=(const PageStorages&) = delete;

  // Ties the storages to their pager, by which the trap finds them, and frees the memory that they had.
  void join(const std::weak_ptr<Pager>& pager, size_t page);

  // The page's bytes are there, at `buffer`.
  void arrive(void* buffer);
  // They are about to go.
  void leave();
  // While an operator makes a view of that one of the storages.
  void begin_view(c10::StorageImpl& storage) const;
  void end_view(c10::StorageImpl& storage) const;

 private:
  void point_all() const;
  void point(c10::StorageImpl& storage) const;

  std::vector<PageStorage> page_storages_;
  bool here_ = false;
  char* buffer_ = nullptr;  // null also for a page without bytes
};

// Which page a storage lives in.
struct PageAddress {
  std::shared_ptr<Pager> pager;  // null: the page's pager is gone, and with it the bytes
  size_t page = 0;
};

// False for a storage that no pager keeps.
bool is_paged(const c10::StorageImpl& storage);
// REQUIRES: is_paged(storage).
PageAddress address_of(const c10::StorageImpl& storage);

}  // namespace zeropage::paging
