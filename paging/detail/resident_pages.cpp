#include "paging/detail/resident_pages.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include "device/named_range.h"
#include "operators/operator_interceptor.h"
#include "zeropage/check.h"
#include "zeropage/event_sink.h"

namespace zeropage::paging::detail {

// Operators that bring pages, and take them away, are no part of the forward that somebody may be recording: hence the
// scopes without an interceptor. A page may go behind an operator whose own operators are seen.

ResidentPages::ResidentPages(std::unique_ptr<PageSource> source, std::string what)
    : source_(std::move(source)), what_(std::move(what)) {}

size_t ResidentPages::add(std::string name, int64_t bytes, std::vector<PageStorage> page_storages,
                          const std::weak_ptr<Pager>& pager) {
  const size_t index = pages_.size();
  pages_.push_back(std::make_unique<Page>(std::move(name), bytes, std::move(page_storages)));
  pages_.back()->page_storages().join(pager, index);
  largest_page_bytes_ = std::max(largest_page_bytes_, bytes);
  return index;
}

int64_t ResidentPages::missing_bytes(std::span<const PageUse> uses) const {
  int64_t bytes = 0;
  for (const PageUse& use : uses) {
    const Page& page = *pages_[use.page];
    if (page.state() == Page::State::kEvicted) bytes += page.bytes();
  }
  return bytes;
}

bool ResidentPages::any_used() const {
  return std::any_of(not_evicted_.begin(), not_evicted_.end(),
                     [this](size_t index) { return pages_[index]->users.any(); });
}

void ResidentPages::note_arrival(size_t index) {
  const int64_t bytes = pages_[index]->bytes();
  not_evicted_.insert(index);
  if (bytes > 0) holding_.insert(index);
  bytes_ += bytes;
}

void ResidentPages::note_departure(size_t index) {
  not_evicted_.erase(index);
  holding_.erase(index);
  bytes_ -= pages_[index]->bytes();
}

bool ResidentPages::may_go(size_t index) const {
  const Page& page = *pages_[index];
  // A page of no bytes lies where its source keeps it: dropping it frees nothing.
  return page.state() != Page::State::kEvicted && !page.users.any() && page.bytes() > 0;
}

void ResidentPages::start_fetch(size_t index) {
  const device::NamedRange range("Pager::start_fetch");
  const memory::OwnerScope owner("page fetch", pages_[index]->name());
  // The buffer serves operators of any mode.
  const c10::InferenceMode no_inference(false);
  const operators::InterceptorScope unseen(nullptr);
  const at::NoGradGuard no_grad;
  Page& page = *pages_[index];
  try {
    page.begin_fetch(source_->start_fetch(index));
  } catch (c10::Error& error) {
    error.add_context(
        c10::str(memory::owner_prefix(), "fetching ", what_, " page \"", page.name(), "\""));
    throw;
  }
  note_arrival(index);
  statistics.bytes_gathered += page.bytes();
  tell_of(memory::PageChange::kFetching, page);
}

void ResidentPages::await(std::unique_lock<std::mutex>& lock, size_t index) {
  Page& page = *pages_[index];
  if (page.state() != Page::State::kFetching) return;
  const device::NamedRange range("Pager::await");
  const memory::OwnerScope owner("page", page.name());
  const memory::Pending arrival = page.arrival();
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
  statistics.wait_seconds += waited.count();
  // Another thread that waited for it may have been quicker.
  if (page.state() == Page::State::kFetching) finish_fetch(page);
}

void ResidentPages::write_back(size_t index) {
  const operators::InterceptorScope unseen(nullptr);
  const at::NoGradGuard no_grad;
  Page& page = *pages_[index];
  if (page.state() != Page::State::kDirty) return;
  source_->write_back(index, page.buffer());
  page.mark_clean();
}

void ResidentPages::drop(size_t index) {
  const device::NamedRange range("Pager::drop");
  const operators::InterceptorScope unseen(nullptr);
  const at::NoGradGuard no_grad;
  Page& page = *pages_[index];
  const memory::OwnerScope owner("page", page.name());
  if (page.state() == Page::State::kFetching) {
    // Its buffer is in use until the fetch has ended. If that failed, nobody was to use it.
    try {
      page.arrival().wait();
    } catch (...) {
      abandon(index);
      return;
    }
    finish_fetch(page);
  }
  write_back(index);
  source_->end_use(index);
  page.evict();
  note_departure(index);
  ++statistics.evictions;
  tell_of(memory::PageChange::kEvicted, page);
}

void ResidentPages::abandon(size_t index) {
  const operators::InterceptorScope unseen(nullptr);
  Page& page = *pages_[index];
  source_->end_use(index);
  page.abandon_fetch();
  note_departure(index);
  tell_of(memory::PageChange::kEvicted, page);
}

void ResidentPages::finish_fetch(Page& page) const {
  page.finish_fetch();
  tell_of(memory::PageChange::kResident, page);
}

void ResidentPages::tell_of(memory::PageChange change, const Page& page) const {
  if (const auto sink = memory::current_sink()) {
    sink->on_page({.change = change, .pages = what_, .page = page.name(), .bytes = page.bytes()});
  }
}

}  // namespace zeropage::paging::detail
