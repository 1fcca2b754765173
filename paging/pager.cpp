#include "paging/pager.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/ScopeExit.h>

#include "device/named_range.h"
#include "memory/bytes.h"
#include "memory/check.h"

namespace zeropage::memory {
namespace {

// Looking further ahead than this costs more than it finds.
constexpr size_t kMostPositionsAhead = 256;

// A thread that holds pins must not wait for other threads to let go of theirs: they may wait for
// it.
thread_local int pins_of_thread = 0;

bool contains(std::span<const PageUse> uses, size_t page) {
  return std::any_of(uses.begin(), uses.end(),
                     [&](const PageUse& use) { return use.page == page; });
}

}  // namespace

PagingStatistics& PagingStatistics::operator+=(const PagingStatistics& other) {
  faults += other.faults;
  prefetched += other.prefetched;
  evictions += other.evictions;
  bytes_gathered += other.bytes_gathered;
  wait_seconds += other.wait_seconds;
  return *this;
}

PagingStatistics PagingStatistics::operator-(const PagingStatistics& earlier) const {
  return {faults - earlier.faults, prefetched - earlier.prefetched, evictions - earlier.evictions,
          bytes_gathered - earlier.bytes_gathered, wait_seconds - earlier.wait_seconds};
}

std::shared_ptr<Pager> Pager::make(std::unique_ptr<PageSource> source, PagerOptions options) {
  return std::shared_ptr<Pager>(new Pager(std::move(source), std::move(options)));
}

Pager::Pager(std::unique_ptr<PageSource> source, PagerOptions options)
    : source_(std::move(source)), options_(std::move(options)) {}

size_t Pager::add_page(std::string name, int64_t bytes, std::vector<Page::Tenant> tenants) {
  ZP_CHECK(options_.budget_bytes == 0 || bytes <= options_.budget_bytes, options_.what, " page \"",
           name, "\" has ", format_bytes(bytes), ", but ", options_.budget_option, " is ",
           format_bytes(options_.budget_bytes), ": no operator could use it; raise it to at least ",
           bytes, " bytes");
  const std::lock_guard lock(mutex_);
  const size_t index = pages_.size();
  pages_.push_back(std::make_unique<Page>(std::move(name), bytes, std::move(tenants)));
  pages_.back()->join(weak_from_this(), index);
  largest_page_bytes_ = std::max(largest_page_bytes_, bytes);
  return index;
}

int64_t Pager::limit_bytes() const {
  if (options_.budget_bytes > 0) return options_.budget_bytes;
  return options_.retention == Retention::kUntilUnused ? 2 * largest_page_bytes_
                                                       : std::numeric_limits<int64_t>::max();
}

int64_t Pager::prefetch_bytes() const {
  return options_.prefetch_bytes == PagerOptions::kTwoLargestPages ? 2 * largest_page_bytes_
                                                                   : options_.prefetch_bytes;
}

// ---- pinning ----

void Pager::pin(std::span<const PageUse> uses, std::string_view who, Pass pass) {
  Lock lock(mutex_);
  const bool moved = touch(uses, pass);
  make_room(lock, uses, who);
  for (const PageUse& use : uses) {
    Page& page = *pages_[use.page];
    ++page.pins;
    if (pass == Pass::kAside) {
      ++page.aside_pins;
      page.aside_writes += use.writes ? 1 : 0;
      page.aside |= page.state() == Page::State::kEvicted;
    } else if (page.aside_pins == 0) {
      page.last_touch = ++clock_;
      page.aside = false;
      statistics_.prefetched += std::exchange(page.prefetched, false) ? 1 : 0;
    }
  }
  pins_of_thread += static_cast<int>(uses.size());
  try {
    for (const PageUse& use : uses) {
      if (pages_[use.page]->state() != Page::State::kEvicted) continue;
      ++statistics_.faults;
      start_fetch(use.page);
    }
    if (moved) look_ahead(uses);
    for (const PageUse& use : uses) await(lock, use.page);
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    for (const PageUse& use : uses) {
      Page& page = *pages_[use.page];
      if (pass == Pass::kAside) {
        --page.aside_pins;
        page.aside_writes -= use.writes ? 1 : 0;
      }
      if (--page.pins == 0 && page.failed) abandon(use.page);
    }
    pins_of_thread -= static_cast<int>(uses.size());
    unpinned_.notify_all();
    throw;
  }
}

void Pager::unpin(std::span<const PageUse> uses, Pass pass) {
  // Also where a page that goes cannot be written back.
  const auto notify = c10::make_scope_exit([this] {
    if (options_.budget_bytes > 0) unpinned_.notify_all();
  });
  const std::lock_guard lock(mutex_);
  for (const PageUse& use : uses) {
    Page& page = *pages_[use.page];
    TORCH_INTERNAL_ASSERT(page.pins > 0);
    --page.pins;
    if (pass == Pass::kAside) {
      --page.aside_pins;
      page.aside_writes -= use.writes ? 1 : 0;
    }
    if (use.writes) page.mark_dirty();
  }
  pins_of_thread -= static_cast<int>(uses.size());
  drop_surplus(uses);
}

// What a guard brought goes with it, and what was pinned beyond the limit. Drops nothing that is on
// its way, so it does not wait.
void Pager::drop_surplus(std::span<const PageUse> unpinned) {
  for (const PageUse& use : unpinned) {
    if (may_go(use.page) && pages_[use.page]->resident() && pages_[use.page]->aside) drop(use.page);
  }
  for (const PageUse& use : unpinned) {
    if (resident_bytes_ <= limit_bytes()) return;
    if (may_go(use.page) && pages_[use.page]->resident()) drop(use.page);
  }
}

bool Pager::is_pinned(size_t page) const {
  const std::lock_guard lock(mutex_);
  return pages_[page]->pins > 0;
}

bool Pager::is_open_to_writes(size_t page) const {
  const std::lock_guard lock(mutex_);
  return pages_[page]->aside_writes > 0;
}

at::Tensor Pager::buffer(size_t page) const {
  const std::lock_guard lock(mutex_);
  TORCH_INTERNAL_ASSERT(pages_[page]->pins > 0 && pages_[page]->resident());
  return pages_[page]->buffer();
}

void Pager::begin_view(size_t page) {
  const std::lock_guard lock(mutex_);
  pages_[page]->begin_view();
}

void Pager::end_view(size_t page) {
  const std::lock_guard lock(mutex_);
  pages_[page]->end_view();
}

bool Pager::touch(std::span<const PageUse> uses, Pass pass) {
  if (pass == Pass::kAside || !options_.traced) return false;
  bool moved = false;
  for (const PageUse& use : uses) {
    // One rank may look alone at what a guard holds, and must not decide by another trace then.
    if (pages_[use.page]->aside_pins > 0) continue;
    trace_ = &traces_[static_cast<size_t>(pass)];
    moved |= trace_->touch(use.page);
  }
  return moved;
}

int64_t Pager::missing_bytes(std::span<const PageUse> uses) const {
  int64_t bytes = 0;
  for (const PageUse& use : uses) {
    const Page& page = *pages_[use.page];
    if (page.state() == Page::State::kEvicted) bytes += page.bytes();
  }
  return bytes;
}

// Evicts until the uses fit. Without an explicit budget an operator gets what it needs.
void Pager::make_room(Lock& lock, std::span<const PageUse> uses, std::string_view who) {
  for (int64_t missing = missing_bytes(uses);
       missing > 0 && missing > limit_bytes() - resident_bytes_; missing = missing_bytes(uses)) {
    if (const auto victim = find_victim(uses)) {
      drop(*victim);
      continue;
    }
    if (options_.budget_bytes == 0) return;
    const bool others_hold_pins =
        std::any_of(pages_.begin(), pages_.end(), [](const auto& page) { return page->pins > 0; });
    if (pins_of_thread > 0 || !others_hold_pins) refuse(uses, who);
    unpinned_.wait(lock);
  }
}

void Pager::refuse(std::span<const PageUse> uses, std::string_view who) const {
  std::string names;
  int64_t needed = 0, pinned = 0;
  for (const PageUse& use : uses) {
    names += c10::str(names.empty() ? "\"" : ", \"", pages_[use.page]->name(), "\" (",
                      format_bytes(pages_[use.page]->bytes()), ")");
    needed += pages_[use.page]->bytes();
  }
  for (size_t index = 0; index < pages_.size(); ++index) {
    if (pages_[index]->pins > 0 && !contains(uses, index)) pinned += pages_[index]->bytes();
  }
  ZP_THROW(who, " needs ", options_.what, " pages ", names, " at once, ", format_bytes(needed),
           pinned == 0 ? std::string()
                       : c10::str(" beside ", format_bytes(pinned),
                                  " that a guard or an outer operator of this thread keeps"),
           ", but ", options_.budget_option, " is ", format_bytes(options_.budget_bytes),
           "; raise it to at least ", needed + pinned, " bytes, or use smaller pages");
}

bool Pager::may_go(size_t index) const {
  const Page& page = *pages_[index];
  // A page of no bytes lies where its source keeps it: dropping it frees nothing.
  return page.state() != Page::State::kEvicted && page.pins == 0 && page.bytes() > 0;
}

std::optional<size_t> Pager::find_victim(std::span<const PageUse> spared,
                                         size_t unused_until) const {
  std::optional<size_t> victim;
  size_t victim_use = 0;
  for (size_t index = 0; index < pages_.size(); ++index) {
    if (!may_go(index) || contains(spared, index)) continue;
    const size_t use = trace_->following() ? trace_->next_use(index) : Trace::kNever;
    if (use < unused_until) continue;
    const bool better =
        !victim || use > victim_use ||
        (use == victim_use && pages_[index]->last_touch < pages_[*victim]->last_touch);
    if (!better) continue;
    victim = index;
    victim_use = use;
  }
  return victim;
}

// ---- along the trace ----

// Runs when the pass has moved on; uses: of the operator that moved it.
void Pager::look_ahead(std::span<const PageUse> uses) {
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
    bytes += pages_[page]->bytes();
  }
  const bool drops = options_.retention == Retention::kUntilUnused && options_.budget_bytes == 0;
  if (drops) drop_all_but(upcoming, uses);
  prefetch(upcoming, uses);
}

// Keeps what is used next, as far as the limit reaches.
void Pager::drop_all_but(const std::vector<size_t>& upcoming, std::span<const PageUse> uses) {
  int64_t kept_bytes = 0;
  for (const PageUse& use : uses) kept_bytes += pages_[use.page]->bytes();
  size_t kept = 0;
  while (kept < upcoming.size()) {
    if (!contains(uses, upcoming[kept])) kept_bytes += pages_[upcoming[kept]]->bytes();
    if (kept_bytes > limit_bytes()) break;
    ++kept;
  }
  const auto end = upcoming.begin() + static_cast<int64_t>(kept);
  for (size_t index = 0; index < pages_.size(); ++index) {
    if (may_go(index) && std::find(upcoming.begin(), end, index) == end) drop(index);
  }
}

void Pager::prefetch(const std::vector<size_t>& upcoming, std::span<const PageUse> uses) {
  int64_t ahead_bytes = 0;
  for (const size_t index : upcoming) {
    Page& page = *pages_[index];
    ahead_bytes += page.bytes();
    if (ahead_bytes > prefetch_bytes()) return;
    if (page.state() != Page::State::kEvicted) continue;
    while (page.bytes() > limit_bytes() - resident_bytes_) {
      const auto victim = find_victim(uses, trace_->next_use(index) + 1);
      if (!victim) return;
      drop(*victim);
    }
    start_fetch(index);
    page.prefetched = true;
  }
}

// ---- coming and going ----

std::string Pager::in_words(const char* verb, const Page& page) const {
  return c10::str(owner_prefix(), verb, " ", options_.what, " page \"", page.name(), "\"");
}

void Pager::start_fetch(size_t index) {
  const NamedRange range("Pager::start_fetch");
  // The buffer serves operators of any mode.
  const c10::InferenceMode no_inference(false);
  const at::NoGradGuard no_grad;
  Page& page = *pages_[index];
  try {
    page.begin_fetch(source_->start_fetch(index));
  } catch (c10::Error& error) {
    error.add_context(in_words("fetching", page));
    throw;
  }
  resident_bytes_ += page.bytes();
  statistics_.bytes_gathered += page.bytes();
}

void Pager::await(Lock& lock, size_t index) {
  Page& page = *pages_[index];
  if (page.state() != Page::State::kFetching) return;
  const NamedRange range("Pager::await");
  const Pending arrival = page.arrival();
  const auto start = std::chrono::steady_clock::now();
  lock.unlock();
  try {
    arrival.wait();
  } catch (...) {
    lock.lock();
    page.failed = true;
    throw;
  }
  lock.lock();
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
  statistics_.wait_seconds += waited.count();
  // Another thread that waited for it may have been quicker.
  if (page.state() == Page::State::kFetching) page.finish_fetch();
}

void Pager::drop(size_t index) {
  const NamedRange range("Pager::drop");
  const at::NoGradGuard no_grad;
  Page& page = *pages_[index];
  if (page.state() == Page::State::kFetching) {
    // Its buffer is in use until the fetch has ended. If that failed, nobody was to use it.
    try {
      page.arrival().wait();
    } catch (...) {
      abandon(index);
      return;
    }
    page.finish_fetch();
  }
  if (page.state() == Page::State::kDirty) {
    source_->write_back(index, page.buffer());
    page.mark_clean();
  }
  source_->end_use(index);
  page.evict();
  resident_bytes_ -= page.bytes();
  ++statistics_.evictions;
}

void Pager::abandon(size_t index) {
  Page& page = *pages_[index];
  source_->end_use(index);
  page.abandon_fetch();
  resident_bytes_ -= page.bytes();
}

void Pager::write_back(size_t index) {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  Page& page = *pages_[index];
  if (page.state() != Page::State::kDirty) return;
  source_->write_back(index, page.buffer());
  page.mark_clean();
}

void Pager::release_all(std::string_view who) {
  const std::lock_guard lock(mutex_);
  for (const auto& page : pages_) {
    ZP_CHECK(page->pins == 0, who, ": ", options_.what, " page \"", page->name(),
             "\" is still in use; let the guard that gathered it end first");
  }
  for (size_t index = 0; index < pages_.size(); ++index) {
    if (pages_[index]->state() != Page::State::kEvicted) drop(index);
  }
}

void Pager::release_unpinned() {
  const std::lock_guard lock(mutex_);
  for (size_t index = 0; index < pages_.size(); ++index) {
    if (may_go(index)) drop(index);
  }
}

void Pager::end_pass(Pass pass) {
  const std::lock_guard lock(mutex_);
  traces_[static_cast<size_t>(pass)].end_pass();
}

PagingStatistics Pager::statistics() const {
  const std::lock_guard lock(mutex_);
  return statistics_;
}

int64_t Pager::resident_bytes() const {
  const std::lock_guard lock(mutex_);
  return resident_bytes_;
}

}  // namespace zeropage::memory
