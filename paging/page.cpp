#include "paging/page.h"

#include <utility>

#include "zeropage/check.h"

namespace zeropage::paging {

Page::Page(std::string name, int64_t bytes, std::vector<StorageInPage> page_storages)
    : name_(std::move(name)), bytes_(bytes), page_storages_(std::move(page_storages)) {}

void Page::begin_fetch(Fetch fetch) {
  move_to(State::kEvicted, State::kFetching);
  fetch_ = std::move(fetch);
}

void Page::finish_fetch() {
  move_to(State::kFetching, State::kClean);
  fetch_.arrival = {};
  page_storages_.arrive(fetch_.buffer.data_ptr());
}

void Page::abandon_fetch() {
  move_to(State::kFetching, State::kEvicted);
  fetch_ = {};
  prefetched = failed = fetched_by_guard = false;
}

void Page::mark_dirty() {
  if (state_ != State::kDirty) move_to(State::kClean, State::kDirty);
}

void Page::mark_clean() {
  move_to(State::kDirty, State::kClean);
}

void Page::evict() {
  move_to(State::kClean, State::kEvicted);
  TORCH_INTERNAL_ASSERT(!users.any(), "page \"", name_, "\" is evicted while an operator uses it");
  page_storages_.leave();
  fetch_ = {};
  prefetched = false;
  fetched_by_guard = false;
}

void Page::move_to(State from, State to) {
  TORCH_INTERNAL_ASSERT(state_ == from, "page \"", name_, "\" cannot become ", paging::name(to),
                        ": it is ", paging::name(state_));
  state_ = to;
}

const char* name(Page::State state) {
  constexpr const char* kNames[] = {"evicted", "fetching", "clean", "dirty"};
  return kNames[static_cast<size_t>(state)];
}

}  // namespace zeropage::paging
