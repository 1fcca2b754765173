#include "paging/page_storages.h"

#include "zeropage/check.h"

namespace zeropage::paging {
namespace {

void release_address(void* address);

// What a paged storage's DataPtr owns as its context. The trap finds it as the storage's allocator:
// that never changes, while the pointer may under the eyes of another thread that starts an
// operator.
struct Address final : c10::Allocator {
  Address(std::weak_ptr<Pager> of_pager, size_t of_page, c10::Device of_page_device,
          int64_t offset_in_page_bytes)
      : pager(std::move(of_pager)),
        page(of_page),
        device(of_page_device),
        offset_bytes(offset_in_page_bytes) {}

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
  const int64_t offset_bytes;
  int views = 0;  // operators that are making a view of the storage
};

void release_address(void* address) {
  delete static_cast<Address*>(address);
}

Address& address_in(c10::StorageImpl& storage) {
  return *static_cast<Address*>(storage.allocator());
}

}  // namespace

void PageStorages::join(const std::weak_ptr<Pager>& pager, size_t page) {
  for (PageStorage& page_storage : page_storages_) {
    c10::StorageImpl* storage = page_storage.storage.unsafeGetStorageImpl();
    auto* address = new Address(pager, page, storage->device(), page_storage.offset_bytes);
    storage->set_data_ptr_noswap({nullptr, address, &release_address, address->device});
    storage->set_allocator(address);
  }
  point_all();
}

void PageStorages::arrive(void* buffer) {
  here_ = true;
  buffer_ = static_cast<char*>(buffer);
  point_all();
}

void PageStorages::leave() {
  here_ = false;
  buffer_ = nullptr;
  point_all();
}

void PageStorages::begin_view(c10::StorageImpl& storage) const {
  if (++address_in(storage).views == 1 && !here_) point(storage);
}

void PageStorages::end_view(c10::StorageImpl& storage) const {
  if (--address_in(storage).views == 0 && !here_) point(storage);
}

void PageStorages::point_all() const {
  for (const PageStorage& page_storage : page_storages_)
    point(*page_storage.storage.unsafeGetStorageImpl());
}

// Keeps the context: only the pointer and the device change.
void PageStorages::point(c10::StorageImpl& storage) const {
  c10::DataPtr& data = storage._mutable_data_ptr_no_checks();
  if (data.get_deleter() != &release_address) return;
  auto* address = static_cast<Address*>(data.move_context().release());
  const bool is_seen = here_ || address->views > 0;
  storage.set_data_ptr_noswap({buffer_ == nullptr ? nullptr : buffer_ + address->offset_bytes,
                               address, &release_address,
                               is_seen ? address->device : c10::Device(c10::kMeta)});
}

bool is_paged(const c10::StorageImpl& storage) {
  const c10::Allocator* allocator = storage.allocator();
  return allocator != nullptr && allocator->raw_deleter() == &release_address;
}

PageAddress address_of(const c10::StorageImpl& storage) {
  const auto* address = static_cast<const Address*>(storage.allocator());
  return {address->pager.lock(), address->page};
}

}  // namespace zeropage::paging
