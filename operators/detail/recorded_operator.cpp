#include "operators/detail/recorded_operator.h"

#include <algorithm>

#include <ATen/Functions.h>

#include "base/exact.h"
#include "zeropage/check.h"

namespace zeropage::operators::detail {

std::optional<size_t> Tape::find(const at::Tensor& meta) const {
  if (!meta.defined() || !meta.has_storage()) return std::nullopt;
  const auto found = storage_numbers.find(meta.storage().unsafeGetStorageImpl());
  if (found == storage_numbers.end()) return std::nullopt;
  return found->second;
}

size_t Tape::add(RecordedStorage storage) {
  const size_t number = storages.size();
  storage_numbers.emplace(storage.meta.unsafeGetStorageImpl(), number);
  storages.push_back(std::move(storage));
  return number;
}

std::string name_of(const c10::OperatorHandle& handle) {
  return c10::toString(handle.operator_name());
}

std::string describe(const at::Tensor& tensor) {
  return c10::str(tensor.scalar_type(), " ", tensor.sizes(), " on ", tensor.device());
}

TensorView view_of(const at::Tensor& tensor, size_t storage) {
  return {.storage = storage,
          .dtype = tensor.scalar_type(),
          .sizes = tensor.sizes().vec(),
          .strides = tensor.strides().vec(),
          .offset = tensor.storage_offset(),
          .storage_bytes = base::narrow<int64_t>(tensor.storage().nbytes()),
          .conjugated = tensor.is_conj(),
          .negated = tensor.is_neg(),
          .wrapped_number = tensor.unsafeGetTensorImpl()->is_wrapped_number()};
}

at::Tensor tensor_of(const TensorView& view, const c10::Storage& storage) {
  at::Tensor tensor = at::empty({0}, at::dtype(view.dtype).device(storage.device()));
  tensor.set_(storage, view.offset, view.sizes, view.strides);
  tensor._set_conj(view.conjugated);
  tensor._set_neg(view.negated);
  if (view.wrapped_number) tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

bool contains(const std::vector<size_t>& numbers, size_t number) {
  return std::find(numbers.begin(), numbers.end(), number) != numbers.end();
}

void insert(std::vector<size_t>& numbers, size_t number) {
  if (!contains(numbers, number)) numbers.push_back(number);
}

}  // namespace zeropage::operators::detail
