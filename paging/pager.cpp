#include "paging/pager.h"

#include <utility>

#include <c10/util/ScopeExit.h>

#include "paging/detail/page_schedule.h"
#include "paging/detail/resident_pages.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"

namespace zeropage::paging {
namespace {

// A thread that holds pins must not wait for other threads to let go of theirs: they may wait for
// it.
thread_local int pins_of_thread = 0;

}  // namespace

std::shared_ptr<Pager> Pager::make(std::unique_ptr<PageSource> source, PagerOptions options) {
  return std::shared_ptr<Pager>(new Pager(std::move(source), std::move(options)));
}

Pager::Pager(std::unique_ptr<PageSource> source, PagerOptions options)
    : options_(std::move(options)),
      pages_(std::make_unique<paging::detail::ResidentPages>(std::move(source), options_.what)),
      schedule_(std::make_unique<paging::detail::PageSchedule>(*pages_, options_)) {}

Pager::~Pager() = default;

size_t Pager::add_page(std::string name, int64_t bytes,
                       std::vector<Page::StorageInPage> page_storages) {
  ZP_CHECK(options_.budget_bytes == 0 || bytes <= options_.budget_bytes, options_.what, " page \"",
           name, "\" has ", memory::format_bytes(bytes), ", but ", options_.budget_option, " is ",
           memory::format_bytes(options_.budget_bytes),
           ": no operator could use it; raise it to at least ", bytes, " bytes");
  const std::lock_guard lock(mutex_);
  return pages_->add(std::move(name), bytes, std::move(page_storages), weak_from_this());
}

void Pager::pin(std::span<const PageUse> uses, std::string_view who, Pass pass) {
  paging::detail::ResidentPages& pages = *pages_;
  Lock lock(mutex_);
  const bool moved = schedule_->touch(uses, pass, pins_of_thread > 0);
  make_room(lock, uses, who);
  for (const PageUse& use : uses) {
    Page& page = pages[use.page];
    page.users.add(pass, use.writes);
    if (pass == Pass::kAside) {
      page.fetched_by_guard |= page.state() == Page::State::kEvicted;
    } else if (!page.users.any_guard()) {
      page.last_touch = ++clock_;
      page.fetched_by_guard = false;
      pages.statistics.prefetched += std::exchange(page.prefetched, false) ? 1 : 0;
    }
  }
  pins_of_thread += static_cast<int>(uses.size());
  try {
    for (const PageUse& use : uses) {
      if (pages[use.page].state() != Page::State::kEvicted) continue;
      ++pages.statistics.faults;
      pages.start_fetch(use.page);
    }
    if (moved) schedule_->look_ahead(uses);
    for (const PageUse& use : uses) pages.await(lock, use.page);
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    for (const PageUse& use : uses) {
      Page& page = pages[use.page];
      page.users.remove(pass, use.writes);
      if (!page.users.any() && page.failed) pages.abandon(use.page);
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
    Page& page = (*pages_)[use.page];
    page.users.remove(pass, use.writes);
    if (use.writes) page.mark_dirty();
  }
  pins_of_thread -= static_cast<int>(uses.size());
  schedule_->drop_surplus(uses);
}

// Evicts until the uses fit. Without an explicit budget an operator gets what it needs.
void Pager::make_room(Lock& lock, std::span<const PageUse> uses, std::string_view who) {
  const auto lacks_room = [&] {
    const int64_t missing = pages_->missing_bytes(uses);
    return missing > 0 && missing > schedule_->limit_bytes() - pages_->bytes();
  };
  while (lacks_room()) {
    if (const auto victim = schedule_->find_victim(uses)) {
      pages_->drop(*victim);
      continue;
    }
    if (options_.budget_bytes == 0) return;
    if (pins_of_thread > 0 || !pages_->any_used()) refuse(uses, who);
    unpinned_.wait(lock);
  }
}

void Pager::refuse(std::span<const PageUse> uses, std::string_view who) const {
  std::string names;
  int64_t needed = 0, pinned = 0;
  for (const PageUse& use : uses) {
    const Page& page = (*pages_)[use.page];
    names += c10::str(names.empty() ? "\"" : ", \"", page.name(), "\" (",
                      memory::format_bytes(page.bytes()), ")");
    needed += page.bytes();
  }
  for (size_t index = 0; index < pages_->size(); ++index) {
    const Page& page = (*pages_)[index];
    if (page.users.any() && !contains(uses, index)) pinned += page.bytes();
  }
  ZP_THROW(who, " needs ", options_.what, " pages ", names, " at once, ",
           memory::format_bytes(needed),
           pinned == 0 ? std::string()
                       : c10::str(" beside ", memory::format_bytes(pinned),
                                  " that a guard or an outer operator of this thread keeps"),
           ", but ", options_.budget_option, " is ", memory::format_bytes(options_.budget_bytes),
           "; raise it to at least ", needed + pinned, " bytes, or use smaller pages");
}

bool Pager::is_pinned(size_t page) const {
  const std::lock_guard lock(mutex_);
  return (*pages_)[page].users.any();
}

bool Pager::is_open_to_writes(size_t page) const {
  const std::lock_guard lock(mutex_);
  return (*pages_)[page].users.any_writing_guard();
}

at::Tensor Pager::buffer(size_t page) const {
  const std::lock_guard lock(mutex_);
  TORCH_INTERNAL_ASSERT((*pages_)[page].users.any() && (*pages_)[page].resident());
  return (*pages_)[page].buffer();
}

void Pager::begin_view(size_t page, c10::StorageImpl& storage) {
  const std::lock_guard lock(mutex_);
  (*pages_)[page].page_storages().begin_view(storage);
}

void Pager::end_view(size_t page, c10::StorageImpl& storage) {
  const std::lock_guard lock(mutex_);
  (*pages_)[page].page_storages().end_view(storage);
}

void Pager::write_back(size_t page) {
  const std::lock_guard lock(mutex_);
  pages_->write_back(page);
}

void Pager::release_all(std::string_view who) {
  const std::lock_guard lock(mutex_);
  paging::detail::ResidentPages& pages = *pages_;
  const std::vector<size_t> there = pages.not_evicted();
  for (const size_t index : there) {
    ZP_CHECK(!pages[index].users.any(), who, ": ", options_.what, " page \"", pages[index].name(),
             "\" is still in use; let the guard that gathered it end first");
  }
  for (const size_t index : there) pages.drop(index);
}

void Pager::release_unpinned() {
  const std::lock_guard lock(mutex_);
  for (const size_t index : pages_->holding_memory()) {
    if (pages_->may_go(index)) pages_->drop(index);
  }
}

void Pager::release_unpinned(size_t page) {
  const std::lock_guard lock(mutex_);
  const Page& released = (*pages_)[page];
  if (released.state() != Page::State::kEvicted && !released.users.any()) pages_->drop(page);
}

void Pager::end_pass(Pass pass) {
  const std::lock_guard lock(mutex_);
  schedule_->end_pass(pass);
  pages_->end_pass();
}

memory::PagingStatistics Pager::statistics() const {
  const std::lock_guard lock(mutex_);
  return pages_->statistics;
}

int64_t Pager::resident_bytes() const {
  const std::lock_guard lock(mutex_);
  return pages_->bytes();
}

int64_t Pager::largest_page_bytes() const {
  return pages_->largest_page_bytes();
}

}  // namespace zeropage::paging
