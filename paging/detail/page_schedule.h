// Which pages should be resident: what is fetched ahead along the trace, and what goes for room.
//
// Lifetime: refers to the pager's pages and options.
// Threads: guarded by the pager's mutex.
// Throws: what the source of a page throws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "paging/detail/resident_pages.h"
#include "paging/page_use.h"
#include "paging/pager_options.h"
#include "paging/trace.h"

namespace zeropage::paging::detail {

class PageSchedule {
 public:
  PageSchedule(ResidentPages& pages, const PagerOptions& options)
      : pages_(pages), options_(options) {}

  // The most that pages may hold, unless one operator without a budget needs more.
  int64_t limit_bytes() const;

  // An operator of that pass touches the pages. is_within: its thread keeps pages already, as an operator does that runs others. True
  // if the pass has moved on.
  bool touch(std::span<const PageUse> uses, Pass pass, bool is_within);
  // The next touch begins a pass.
  void end_pass(Pass pass) { traces_[static_cast<size_t>(pass)].end_pass(); }

  // Drops what is not needed soon, and fetches what is. When the pass has moved on; uses: of the
  // operator that moved it.
  void look_ahead(std::span<const PageUse> uses);
  // The page to evict first, of those not used before position `unused_until` of the plan.
  std::optional<size_t> find_victim(std::span<const PageUse> spared, size_t unused_until = 0) const;
  // What a guard brought goes with it, and what was used beyond the limit. Drops nothing that is on
  // its way, so it does not wait.
  void drop_surplus(std::span<const PageUse> unpinned);

 private:
  int64_t prefetch_bytes() const;
  void drop_all_but(const std::vector<size_t>& upcoming, std::span<const PageUse> uses);
  void prefetch(const std::vector<size_t>& upcoming, std::span<const PageUse> uses);

  ResidentPages& pages_;
  const PagerOptions& options_;
  Trace traces_[2];  // by Pass
  Trace* trace_ = &traces_[0];
};

}  // namespace zeropage::paging::detail
