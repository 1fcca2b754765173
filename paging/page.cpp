#include "paging/page.h"

#include <utility>

#include "memory/check.h"
#include "memory/exact.h"

namespace zeropage::memory {
namespace {

void release_address(void* address);

// What a paged storage's DataPtr owns as its context. The trap finds it as the storage's allocator:
// that never changes, while the pointer may under the eyes of another thread that starts an
// operator.
struct Address final : c10::Allocator {
  Address(std::weak_ptr<Pager> of_pager, size_t of_page, c10::Device of_page_device)
      : pager(std::move(of_pager)), page(of_page), device(of_page_device) {}

  // For an operator whose result does not fit.
  c10::DataPtr allocate(size_t bytes) override {
    ZP_THROW("a result of ", bytes,
             " bytes does not fit the sharded tensor that it is written to, ",
             "whose memory belongs to its page; give the operator an output of the right sizes");
  }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
  // The mark by which a paged storage is known.
  c10::DeleterFnPtr raw_deleter() const override { return &release_address; }

  const std::weak_ptr<Pager> pager;
  const size_t page;
  const c10::Device device;  // where the storage lies while its page is resident
};

void release_address(void* address) {
  delete static_cast<Address*>(address);
}

}  // namespace

Page::Page(std::string name, int64_t bytes, std::vector<Tenant> tenants)
    : name_(std::move(name)), bytes_(bytes), tenants_(std::move(tenants)) {}

Page::~Page() {
  state_ = State::kEvicted;
  point_tenants();
}

void Page::join(const std::weak_ptr<Pager>& pager, size_t index) {
  TORCH_INTERNAL_ASSERT(state_ == State::kEvicted);
  for (Tenant& tenant : tenants_) {
    c10::StorageImpl* storage = tenant.storage.unsafeGetStorageImpl();
    auto* address = new Address(pager, index, storage->device());
    storage->set_data_ptr_noswap({nullptr, address, &release_address, address->device});
    storage->set_allocator(address);
  }
  point_tenants();
}

void Page::begin_fetch(Fetch fetch) {
  move_to(State::kEvicted, State::kFetching);
  fetch_ = std::move(fetch);
}

void Page::finish_fetch() {
  move_to(State::kFetching, State::kClean);
  fetch_.arrival = {};
  point_tenants();
}

void Page::abandon_fetch() {
  move_to(State::kFetching, State::kEvicted);
  fetch_ = {};
  prefetched = failed = aside = false;
}

void Page::mark_dirty() {
  if (state_ != State::kDirty) move_to(State::kClean, State::kDirty);
}

void Page::mark_clean() {
  move_to(State::kDirty, State::kClean);
}

void Page::evict() {
  move_to(State::kClean, State::kEvicted);
  TORCH_INTERNAL_ASSERT(pins == 0, "page \"", name_, "\" is evicted while an operator uses it");
  point_tenants();
  fetch_ = {};
  prefetched = false;
  aside = false;
}

void Page::move_to(State from, State to) {
  TORCH_INTERNAL_ASSERT(state_ == from, "page \"", name_, "\" cannot become ", memory::name(to),
                        ": it is ", memory::name(state_));
  state_ = to;
}

void Page::begin_view() {
  if (++views_ == 1 && !resident()) point_tenants();
}

void Page::end_view() {
  if (--views_ == 0 && !resident()) point_tenants();
}

// Keeps the context: only the pointer and the device change.
void Page::point_tenants() {
  const bool is_seen = resident() || views_ > 0;
  char* buffer = resident() ? static_cast<char*>(fetch_.buffer.data_ptr()) : nullptr;
  for (Tenant& tenant : tenants_) {
    c10::StorageImpl* storage = tenant.storage.unsafeGetStorageImpl();
    c10::DataPtr& data = storage->_mutable_data_ptr_no_checks();
    if (data.get_deleter() != &release_address) continue;
    auto* address = static_cast<Address*>(data.move_context().release());
    storage->set_data_ptr_noswap({buffer == nullptr ? nullptr : buffer + tenant.offset_bytes,
                                  address, &release_address,
                                  is_seen ? address->device : c10::Device(c10::kMeta)});
  }
}

const char* name(Page::State state) {
  constexpr const char* kNames[] = {"evicted", "fetching", "clean", "dirty"};
  return kNames[static_cast<size_t>(state)];
}

bool is_paged(const c10::StorageImpl& storage) {
  const c10::Allocator* allocator = storage.allocator();
  return allocator != nullptr && allocator->raw_deleter() == &release_address;
}

PageAddress address_of(const c10::StorageImpl& storage) {
  const auto* address = static_cast<const Address*>(storage.allocator());
  return {address->pager.lock(), address->page};
}

}  // namespace zeropage::memory
