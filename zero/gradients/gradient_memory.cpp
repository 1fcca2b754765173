#include "zero/gradients/gradient_memory.h"

#include <utility>

#include "memory/storage.h"
#include "operators/tensor_mark.h"

namespace zeropage::zero {

class GradientMemory::Keeper final : public c10::BackendMeta {
 public:
  explicit Keeper(at::Tensor memory) : memory_(std::move(memory)) {}

  // While somebody knows where the keeper was, the object stays.
  void release_resources() override { memory_.reset(); }

 private:
  at::Tensor memory_;
};

void GradientMemory::set(const at::Tensor& memory) {
  reset();
  held_ = memory;
  dtype_ = memory.scalar_type();
  storage_ = memory.storage().getWeakStorageImpl();
}

at::Tensor GradientMemory::get() const {
  if (held_.defined()) return held_;
  auto storage = storage_.lock();
  return storage ? memory::flat_over(c10::Storage(std::move(storage)), dtype_) : at::Tensor();
}

const at::Tensor& GradientMemory::hold() {
  held_ = get();
  return held_;
}

void GradientMemory::reset() {
  held_.reset();
  storage_.reset();
  keeper_.reset();
}

bool GradientMemory::has(const at::Tensor& tensor) const {
  return tensor.defined() && tensor.has_storage() && !storage_.expired() &&
         tensor.storage().unsafeGetStorageImpl() == storage_._unsafe_get_target();
}

c10::intrusive_ptr<c10::BackendMeta> GradientMemory::keeper() {
  auto keeper = keeper_.lock();
  if (!keeper) {
    keeper = c10::make_intrusive<Keeper>(get());
    keeper_ = c10::weak_intrusive_ptr<c10::BackendMeta>(keeper);
  }
  return keeper;
}

bool GradientMemory::is_kept_by(const at::Tensor& tensor) const {
  if (!tensor.defined() || keeper_.expired()) return false;
  const operators::TensorMark* const mark = operators::mark_of(tensor);
  const c10::BackendMeta* const kept =
      mark != nullptr ? mark->kept() : tensor.unsafeGetTensorImpl()->get_backend_meta();
  return kept == keeper_._unsafe_get_target();
}

}  // namespace zeropage::zero
