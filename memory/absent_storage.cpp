#include "memory/absent_storage.h"

#include <utility>

#include <ATen/ATen.h>

#include "memory/self_check.h"
#include "zeropage/check.h"

namespace zeropage::memory {
namespace {

// LibTorch sets this flag for tensors that never get memory, and has no function that takes it back. A private member may be
// named where a template is instantiated explicitly.
template <auto kMember>
struct NamedMember {
  friend bool& throws_on_look(c10::StorageImpl& storage) { return storage.*kMember; }
};
bool& throws_on_look(c10::StorageImpl& storage);
template struct NamedMember<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

std::string words_of_look(const std::function<void()>& look) {
  try {
    look();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

void probe_absent_storages() {
  const at::Tensor tensor = at::full({4}, 2.0, at::kFloat);
  const at::Tensor view = tensor.view({2, 2});
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  const std::string why = "it is away";
  make_absent(storage, why);
  const auto tells = [&](const std::function<void()>& look) {
    return words_of_look(look).find(why) != std::string::npos;
  };
  expect_of_libtorch("an operator that reads a storage which is away throws",
                     tells([&] { view.sum(); }));
  expect_of_libtorch("an operator that writes to it throws",
                     tells([&] { at::Tensor(view).zero_(); }));
  expect_of_libtorch("data_ptr() of it throws", tells([&] { tensor.data_ptr(); }));
  expect_of_libtorch("the bytes of a storage that is away", size_t{16}, storage.nbytes());
  at::Tensor other = at::full({4}, 3.0, at::kFloat);
  make_present(storage,
               std::move(other.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
  expect_of_libtorch("the sum of a view whose storage was away", 12.0F, view.sum().item<float>());
  at::Tensor(view).zero_();
  expect_of_libtorch("the same after a write", 0.0F, tensor.sum().item<float>());
}

}  // namespace

void make_absent(c10::StorageImpl& storage, std::string why) {
  storage.set_data_ptr_noswap({nullptr, storage.device()});
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(why));
}

bool is_absent(const c10::StorageImpl& storage) {
  return throws_on_look(const_cast<c10::StorageImpl&>(storage));
}

void make_present(c10::StorageImpl& storage, c10::DataPtr memory) {
  TORCH_INTERNAL_ASSERT(is_absent(storage) && memory.device() == storage.device());
  throws_on_look(storage) = false;
  storage.get_extra_meta().custom_data_ptr_error_msg_ = std::nullopt;
  storage.set_data_ptr_noswap(std::move(memory));
}

void check_absent_storages() {
  static SelfCheck check("park() of a model", "a model that stays where it is",
                         &probe_absent_storages);
  check.require();
}

}  // namespace zeropage::memory
