#include "zero/pages/element_places.h"

#include <algorithm>

#include "zeropage/check.h"

namespace zeropage::zero {

void ElementPlaces::set(size_t index, const at::Tensor& tensor) {
  Place& place = places_[index];
  TORCH_INTERNAL_ASSERT(place.storage == nullptr && tensor.has_storage());
  place = {.storage = tensor.storage().unsafeGetStorageImpl(),
           .offset = tensor.storage_offset(),
           .begin = extents_.size(),
           .dimensions = static_cast<size_t>(tensor.dim())};
  extents_.insert(extents_.end(), tensor.sizes().begin(), tensor.sizes().end());
  extents_.insert(extents_.end(), tensor.strides().begin(), tensor.strides().end());
}

bool ElementPlaces::has(size_t index, const at::Tensor& tensor) const {
  const Place& place = places_[index];
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  // A tensor without a storage, as a sparse one, has a null one here.
  if (place.storage == nullptr || impl.unsafe_storage().unsafeGetStorageImpl() != place.storage) {
    return false;
  }
  const at::IntArrayRef sizes = impl.sizes();
  if (sizes.size() != place.dimensions || impl.storage_offset() != place.offset) return false;
  const int64_t* const own_sizes = extents_.data() + place.begin;
  return std::equal(sizes.begin(), sizes.end(), own_sizes) &&
         std::equal(impl.strides().begin(), impl.strides().end(), own_sizes + place.dimensions);
}

}  // namespace zeropage::zero
