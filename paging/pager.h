// Which pages are resident, and when they come and go.
//
//   fault      an operator needs a page that is not resident: it is fetched, and the operator waits
//   prefetch   along the recorded trace (paging/trace), pages are fetched before they are needed
//   eviction   for room, the page whose next use is furthest goes first (Belady); without a plan the
//              one touched longest ago
//
// Decisions depend on the order of touches and on sizes, never on time: ranks that run the same
// operators fetch the same pages in the same order, which collectives need. What an operator does
// with a page that a guard holds counts for nothing: it may run on one rank alone.
//
// Lifetime: made by make(); shares nothing with the tensors in its pages. When it goes, they stay
// evicted for ever, and using one is an error in words. A Pins keeps it alive.
// Threads: any; an operator waits for its pages without the pager's mutex, a page that is dropped
// while it is on its way is waited for under it. With a source that communicates, threads of a rank must not fault at the same time, or ranks fetch in different
// orders.
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
#include "paging/paging_statistics.h"
#include "paging/trace.h"

namespace zeropage::memory {

// Where pages come from and where what was written goes. Called under the pager's mutex.
class PageSource {
 public:
  virtual ~PageSource() = default;
  virtual Fetch start_fetch(size_t page) = 0;
  // buffer: of the page, written to since it came. Has ended, or is enqueued, before it returns.
  virtual void write_back(size_t page, const at::Tensor& buffer) = 0;
  // The page's buffer is about to be let go: what was enqueued to the calling thread's current stream
  // still uses it.
  virtual void end_use(size_t /*page*/) {}
};

enum class Retention : uint8_t {
  kUntilUnused,    // a page goes when the trace does not need it soon
  kUntilReleased,  // a page stays until release_all(), or until the budget needs its room
};

struct PagerOptions {
  // What the pages hold, for errors: "parameter".
  std::string what = "parameter";

  // Pages that are resident or on their way never hold more. 0: as many as retention keeps; with
  // kUntilUnused that is two largest pages, or what one operator needs.
  int64_t budget_bytes = 0;
  std::string budget_option = "the budget";  // what errors tell the user to raise

  // How far ahead along the trace pages are fetched, within the budget. 0: never.
  // Unset: two largest pages.
  static constexpr int64_t kTwoLargestPages = -1;
  int64_t prefetch_bytes = kTwoLargestPages;

  Retention retention = Retention::kUntilUnused;

  // Whether passes repeat, so that their traces are worth recording.
  bool traced = true;
};

// Training and inference have a trace each; what happens aside (a guard of the user) has none.
enum class Pass : uint8_t { kTraining, kInference, kAside };

struct PageUse {
  size_t page = 0;
  bool writes = false;
};

class Pager : public std::enable_shared_from_this<Pager> {
 public:
  static std::shared_ptr<Pager> make(std::unique_ptr<PageSource> source, PagerOptions options);
  Pager(const Pager&) = delete;
  Pager& operator=(const Pager&) = delete;

  // Evicts the tenants' storages; their bytes are the source's from here on. Returns the page's index, from 0 on.
  // Throws if the page alone exceeds the budget.
  size_t add_page(std::string name, int64_t bytes, std::vector<Page::Tenant> tenants);

  // Makes the pages resident until the same uses are unpinned. who: for errors, such as an operator.
  void pin(std::span<const PageUse> uses, std::string_view who, Pass pass);
  void unpin(std::span<const PageUse> uses, Pass pass);
  bool is_pinned(size_t page) const;
  // By a guard under which its tensors may be written to, and be given other memory.
  bool is_open_to_writes(size_t page) const;
  // The whole page. REQUIRES: it is pinned.
  at::Tensor buffer(size_t page) const;
  // While an operator makes a view of a storage in the page (paging/page.h).
  void begin_view(size_t page);
  void end_view(size_t page);

  // Writes the page back if it is dirty; it stays.
  void write_back(size_t page);
  // Writes back what is dirty and evicts everything. Throws if a page is pinned.
  void release_all(std::string_view who);
  // The same for what is not pinned.
  void release_unpinned();
  // The next touch begins a pass.
  void end_pass(Pass pass);

  // Since the pager was made.
  PagingStatistics statistics() const;
  int64_t resident_bytes() const;
  int64_t largest_page_bytes() const { return largest_page_bytes_; }

 private:
  using Lock = std::unique_lock<std::mutex>;

  Pager(std::unique_ptr<PageSource> source, PagerOptions options);

  int64_t limit_bytes() const;
  int64_t prefetch_bytes() const;
  bool touch(std::span<const PageUse> uses, Pass pass);
  int64_t missing_bytes(std::span<const PageUse> uses) const;
  void make_room(Lock& lock, std::span<const PageUse> uses, std::string_view who);
  [[noreturn]] void refuse(std::span<const PageUse> uses, std::string_view who) const;
  // The page to evict first, of those not used before position `unused_until` of the plan.
  std::optional<size_t> find_victim(std::span<const PageUse> spared, size_t unused_until = 0) const;
  bool may_go(size_t page) const;
  void look_ahead(std::span<const PageUse> uses);
  void drop_surplus(std::span<const PageUse> unpinned);
  void drop_all_but(const std::vector<size_t>& upcoming, std::span<const PageUse> uses);
  void prefetch(const std::vector<size_t>& upcoming, std::span<const PageUse> uses);
  std::string in_words(const char* verb, const Page& page) const;
  void start_fetch(size_t page);
  void await(Lock& lock, size_t page);
  void drop(size_t page);
  void abandon(size_t page);

  const std::unique_ptr<PageSource> source_;
  const PagerOptions options_;
  int64_t largest_page_bytes_ = 0;

  mutable std::mutex mutex_;
  std::condition_variable unpinned_;
  // Guarded by mutex_.
  std::vector<std::unique_ptr<Page>> pages_;
  Trace traces_[2];  // by Pass
  Trace* trace_ = &traces_[0];
  int64_t resident_bytes_ = 0;  // and those on their way
  int64_t clock_ = 0;
  PagingStatistics statistics_;
};

}  // namespace zeropage::memory
