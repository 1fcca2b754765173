#include "paging/detail/page_schedule.h"

#include <algorithm>
#include <limits>

namespace zeropage::paging::detail {
namespace {

// Looking further ahead than this costs more than it finds.
constexpr size_t kMostPositionsAhead = 256;

}  // namespace

int64_t PageSchedule::limit_bytes() const {
  if (options_.budget_bytes > 0) return options_.budget_bytes;
  return options_.retention == Retention::kUntilUnused ? 2 * pages_.largest_page_bytes()
                                                       : std::numeric_limits<int64_t>::max();
}

int64_t PageSchedule::prefetch_bytes() const {
  return options_.prefetch_bytes == PagerOptions::kTwoLargestPages ? 2 * pages_.largest_page_bytes()
                                                                   : options_.prefetch_bytes;
}

bool PageSchedule::touch(std::span<const PageUse> uses, Pass pass, bool is_within) {
  if (pass == Pass::kAside || !options_.traced) return false;
  bool moved = false;
  for (const PageUse& use : uses) {
    const PageUsers& users = pages_[use.page].users;
    // One rank may look alone at what a guard holds, and must not decide by another trace then. How often an operator looks at
    // its pages within may differ on ranks too, as that of experts does, which looks once for each that has tokens.
    if (users.any_guard() || (is_within && users.any())) continue;
    trace_ = &traces_[static_cast<size_t>(pass)];
    moved |= trace_->touch(use.page);
  }
  return moved;
}

void PageSchedule::look_ahead(std::span<const PageUse> uses) {
  if (!trace_->following()) return;
  std::vector<size_t> upcoming;  // each page once, the next one first
  const std::vector<size_t>& plan = trace_->plan();
  const size_t first = trace_->next_position();
  int64_t bytes = 0;
  const int64_t enough = std::max(limit_bytes(), prefetch_bytes());
  for (size_t position = first;
       position < std::min(plan.size(), first + kMostPositionsAhead) && bytes <= enough;
       ++position) {
    const size_t page = plan[position];
    if (trace_->next_use(page) != position) continue;
    upcoming.push_back(page);
    bytes += pages_[page].bytes();
  }
  const bool drops = options_.retention == Retention::kUntilUnused && options_.budget_bytes == 0;
  if (drops) drop_all_but(upcoming, uses);
  prefetch(upcoming, uses);
}

// Keeps what is used next, as far as the limit reaches.
void PageSchedule::drop_all_but(const std::vector<size_t>& upcoming,
                                std::span<const PageUse> uses) {
  int64_t kept_bytes = 0;
  for (const PageUse& use : uses) kept_bytes += pages_[use.page].bytes();
  size_t kept = 0;
  while (kept < upcoming.size()) {
    if (!contains(uses, upcoming[kept])) kept_bytes += pages_[upcoming[kept]].bytes();
    if (kept_bytes > limit_bytes()) break;
    ++kept;
  }
  const auto end = upcoming.begin() + static_cast<int64_t>(kept);
  for (const size_t index : pages_.holding_memory()) {
    if (pages_.may_go(index) && std::find(upcoming.begin(), end, index) == end) pages_.drop(index);
  }
}

void PageSchedule::prefetch(const std::vector<size_t>& upcoming, std::span<const PageUse> uses) {
  int64_t ahead_bytes = 0;
  for (const size_t index : upcoming) {
    Page& page = pages_[index];
    ahead_bytes += page.bytes();
    if (ahead_bytes > prefetch_bytes()) return;
    if (page.state() != Page::State::kEvicted) continue;
    while (page.bytes() > limit_bytes() - pages_.bytes()) {
      const auto victim = find_victim(uses, trace_->next_use(index) + 1);
      if (!victim) return;
      pages_.drop(*victim);
    }
    pages_.start_fetch(index);
    page.prefetched = true;
  }
}

std::optional<size_t> PageSchedule::find_victim(std::span<const PageUse> spared,
                                                size_t unused_until) const {
  std::optional<size_t> victim;
  size_t victim_use = 0;
  for (const size_t index : pages_.holding_memory()) {
    if (!pages_.may_go(index) || contains(spared, index)) continue;
    const size_t use = trace_->following() ? trace_->next_use(index) : Trace::kNever;
    if (use < unused_until) continue;
    const bool better =
        !victim || use > victim_use ||
        (use == victim_use && pages_[index].last_touch < pages_[*victim].last_touch);
    if (!better) continue;
    victim = index;
    victim_use = use;
  }
  return victim;
}

void PageSchedule::drop_surplus(std::span<const PageUse> unpinned) {
  const auto may_go_now = [&](const PageUse& use) {
    return pages_.may_go(use.page) && pages_[use.page].resident();
  };
  for (const PageUse& use : unpinned) {
    if (may_go_now(use) && pages_[use.page].fetched_by_guard) pages_.drop(use.page);
  }
  for (const PageUse& use : unpinned) {
    if (pages_.bytes() <= limit_bytes()) return;
    if (may_go_now(use)) pages_.drop(use.page);
  }
}

}  // namespace zeropage::paging::detail
