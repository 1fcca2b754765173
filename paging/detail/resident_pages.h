// The pages of a pager: which of them hold memory, and how one comes and goes.
//
// Lifetime: owned by its pager, and owns the source.
// Threads: guarded by the pager's mutex, which await() lets go while it waits.
// Throws: what the source throws, and fetches the page anew at the next try.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "paging/page.h"
#include "paging/page_source.h"
#include "paging/page_use.h"
#include "zeropage/detail/paging_statistics.h"
#include "zeropage/event_sink.h"

namespace zeropage::paging::detail {

class ResidentPages {
 public:
  // what: the pages hold, for errors.
  ResidentPages(std::unique_ptr<PageSource> source, std::string what);

  // Evicts the tenants' storages. Returns the page's index.
  size_t add(std::string name, int64_t bytes, std::vector<PageStorage> page_storages,
             const std::weak_ptr<Pager>& pager);

  size_t size() const { return pages_.size(); }
  Page& operator[](size_t page) { return *pages_[page]; }
  const Page& operator[](size_t page) const { return *pages_[page]; }

  // Bytes of all pages that hold memory or are being fetched.
  int64_t bytes() const { return bytes_; }
  int64_t largest_page_bytes() const { return largest_page_bytes_; }
  // Bytes that must be fetched before the uses can begin.
  int64_t missing_bytes(std::span<const PageUse> uses) const;
  bool any_used() const;
  // Those that are there or on their way, ascending. All others are used by nobody.
  std::vector<size_t> not_evicted() const { return {not_evicted_.begin(), not_evicted_.end()}; }
  // Those of them that hold memory, which a page of no bytes does not.
  std::vector<size_t> holding_memory() const { return {holding_.begin(), holding_.end()}; }
  // Whether it holds memory that nobody uses.
  bool may_go(size_t page) const;

  void start_fetch(size_t page);
  // Waits until it is there.
  void await(std::unique_lock<std::mutex>& lock, size_t page);
  // Writes it back if it is dirty; it stays.
  void write_back(size_t page);
  // Writes it back if it is dirty, and lets its memory go.
  void drop(size_t page);
  void end_pass() { source_->end_pass(); }
  // Lets the memory go of a page whose fetch has failed.
  void abandon(size_t page);

  // Counts fetches and evictions; the pager counts faults and prefetches.
  memory::PagingStatistics statistics;

 private:
  void note_arrival(size_t page);
  void note_departure(size_t page);
  void finish_fetch(Page& page) const;
  void tell_of(memory::PageChange change, const Page& page) const;

  const std::unique_ptr<PageSource> source_;
  const std::string what_;
  std::vector<std::unique_ptr<Page>> pages_;
  std::set<size_t> not_evicted_;
  std::set<size_t> holding_;  // of them
  int64_t largest_page_bytes_ = 0;
  int64_t bytes_ = 0;
};

}  // namespace zeropage::paging::detail
