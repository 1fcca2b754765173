// Large blocks of whole pages, reused.
//
// A heap keeps freed blocks between live ones, so what the operating system sees drifts above what
// is held. Fresh mappings do not, but every page of them costs a fault and a zero-fill. The pool
// keeps what is freed, joins neighbours, and hands out the smallest idle block that is large enough,
// cut to size, under one rule: what is mapped never exceeds the most that was live at once. Where no
// idle block is large enough, as much as would break the rule is unmapped before a new one is mapped.
//
// Thread-safe.
#pragma once

#include <cstddef>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace zeropage::memory {

class MappingPool {
 public:
  struct Block {
    void* data = nullptr;
    size_t bytes = 0;  // whole pages
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

  // Makes it idle, before `place`.
  void add_idle(const Block& block, IdleList::iterator place);
  // Where the block was in the list, what followed.
  IdleList::iterator forget(IdleList::iterator idle);
  // Unmaps of idle blocks, the longest idle first, until `limit` bytes or fewer are mapped.
  void shrink_to(size_t limit);

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  IdleList idle_;
  std::map<std::byte*, IdleList::iterator> idle_by_address_;
  std::set<std::pair<size_t, std::byte*>> idle_by_bytes_;
  size_t live_bytes_ = 0;
  size_t idle_bytes_ = 0;
  size_t most_live_bytes_ = 0;
};

}  // namespace zeropage::memory
