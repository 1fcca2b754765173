// Large blocks as mappings of their own, reused while they fit.
//
// A heap keeps freed blocks between live ones, so what the operating system sees drifts above what
// is held. Fresh mappings do not, but every page of them costs a fault and a zero-fill. The pool
// keeps freed mappings and hands them out again, under one rule: what is mapped never exceeds the
// most that was live at once. Idle mappings of the wrong size are unmapped before a new one would
// break it.
//
// Thread-safe.
#pragma once

#include <cstddef>
#include <list>
#include <map>
#include <mutex>

namespace zeropage::memory {

class MappingPool {
 public:
  struct Block {
    void* data = nullptr;
    size_t bytes = 0;  // what is mapped: whole pages
  };

  MappingPool() = default;
  ~MappingPool();
  MappingPool(const MappingPool&) = delete;
  MappingPool& operator=(const MappingPool&) = delete;

  // At least `bytes`, aligned to a page. Contents are undefined. Throws std::bad_alloc.
  Block take(size_t bytes);
  void give_back(Block block);
  // Unmaps all idle blocks and forgets how much was live at once: for a program that is past its
  // peak.
  void trim();

  size_t live_bytes() const;
  size_t idle_bytes() const;

 private:
  using IdleList = std::list<Block>;  // the longest idle first

  IdleList::iterator find_fit(size_t bytes);
  void forget(IdleList::iterator idle);
  // Unmaps idle blocks, the longest idle first, until `limit` bytes or fewer are mapped.
  void shrink_to(size_t limit);

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  IdleList idle_;
  std::multimap<size_t, IdleList::iterator> idle_by_bytes_;
  size_t live_bytes_ = 0;
  size_t idle_bytes_ = 0;
  size_t most_live_bytes_ = 0;
};

}  // namespace zeropage::memory
