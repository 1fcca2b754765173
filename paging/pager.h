// Which pages are resident, and when they come and go: what operators and guards ask, under one lock.
//
//   fault      an operator needs a page that is not resident: it is fetched, and the operator waits
//   prefetch   along the recorded trace (paging/trace.h), pages are fetched before they are needed
//   eviction   for room, the page whose next use is furthest goes first (Belady); without a plan the
//              one touched longest ago
//
// Decisions depend on the order of touches and on sizes, never on time: ranks that run the same
// operators fetch the same pages in the same order, which collectives need. What an operator does
// with a page that a guard holds counts for nothing: it may run on one rank alone.
//
// Lifetime: made by make(); shares nothing with the tensors in its pages. When it goes, they stay
// evicted for ever, and using one is an error. A Pins keeps it alive.
// Threads: any; an operator waits for its pages without the pager's mutex, a page that is dropped
// while it is on its way is waited for under it. With a source that communicates, threads of a rank
// must not fault at the same time, or ranks fetch in different orders.
// Throws: what the source throws, and fetches the page anew at the next try; a budget that one
// operator exceeds.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "paging/page.h"
#include "paging/page_source.h"
#include "paging/page_use.h"
#include "paging/pager_options.h"
#include "paging/trace.h"
#include "zeropage/detail/paging_statistics.h"

namespace zeropage::paging {

namespace detail {
class PageSchedule;
class ResidentPages;
}  // namespace detail

class Pager : public std::enable_shared_from_this<Pager> {
 public:
  static std::shared_ptr<Pager> make(std::unique_ptr<PageSource> source, PagerOptions options);
  ~Pager();
  Pager(const Pager&) = delete;
  Pager& operator=(const Pager&) = delete;

  // Evicts the tenants' storages; their bytes are the source's from here on. Returns the page's index, from 0 on.
  // Throws if the page alone exceeds the budget.
  size_t add_page(std::string name, int64_t bytes, std::vector<Page::StorageInPage> page_storages);

  // PagerOptions::before_use.
  void announce(const c10::OperatorName& operation, bool reads) const {
    if (options_.before_use) options_.before_use(operation, reads);
  }

  // Makes the pages resident until the same uses are unpinned. who: for errors, such as an operator.
  void pin(std::span<const PageUse> uses, std::string_view who, Pass pass);
  void unpin(std::span<const PageUse> uses, Pass pass);
  bool is_pinned(size_t page) const;
  // By a guard under which its tensors may be written to, and be given other memory.
  bool is_open_to_writes(size_t page) const;
  // The whole page. REQUIRES: it is pinned.
  at::Tensor buffer(size_t page) const;
  // While an operator makes a view of that storage in the page (paging/page_storages.h).
  void begin_view(size_t page, c10::StorageImpl& storage);
  void end_view(size_t page, c10::StorageImpl& storage);

  // Writes the page back if it is dirty; it stays.
  void write_back(size_t page);
  // Writes back what is dirty and evicts everything. Throws if a page is pinned.
  void release_all(std::string_view who);
  // The same for what is not pinned: of the pages that have bytes, or of this one.
  void release_unpinned();
  void release_unpinned(size_t page);
  // The next touch begins a pass.
  void end_pass(Pass pass);

  // Since the pager was made.
  memory::PagingStatistics statistics() const;
  int64_t resident_bytes() const;
  int64_t largest_page_bytes() const;

 private:
  using Lock = std::unique_lock<std::mutex>;

  Pager(std::unique_ptr<PageSource> source, PagerOptions options);

  void make_room(Lock& lock, std::span<const PageUse> uses, std::string_view who);
  [[noreturn]] void refuse(std::span<const PageUse> uses, std::string_view who) const;

  const PagerOptions options_;

  mutable std::mutex mutex_;
  std::condition_variable unpinned_;
  // Guarded by mutex_.
  const std::unique_ptr<paging::detail::ResidentPages> pages_;
  const std::unique_ptr<paging::detail::PageSchedule> schedule_;
  int64_t clock_ = 0;
};

}  // namespace zeropage::paging
