// Memory that the gradient of a page has: its bucket, or this rank's shard of it.
//
//   set(memory) ... let_go() ... hold() ... let_go() ... the last p.grad() of the page goes, and get() is undefined
//
// While a backward works on it, it is held here. From then on p.grad() of the page's parameters alone keep it, as
// they keep their own memory in a loop without Zeropage: it goes with the last of them, however the user zeroes or
// replaces them, and a p.grad() that the user keeps stays what it was. A p.grad() that lies in the memory keeps
// it by its storage. One that is a sharded tensor has a keeper.
//
// Threads: the thread that runs backward. Gradients may go on any thread.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

namespace zeropage::zero {

class GradientMemory {
 public:
  // From here on it is `memory`, and held. [numel], alone in its storage.
  void set(const at::Tensor& memory);
  // Undefined where there is none, or nobody keeps it any more.
  at::Tensor get() const;
  // The same, held.
  const at::Tensor& hold();
  void let_go() { held_.reset(); }
  // There is none. Who keeps what it was keeps it.
  void reset();

  // Whether the tensor lies in it.
  bool has(const at::Tensor& tensor) const;
  // What keeps it as long as a tensor has it (TensorImpl::set_backend_meta), or a tensor's mark; detach() hands it on.
  // REQUIRES: get() is defined.
  c10::intrusive_ptr<c10::BackendMeta> keeper();
  // Whether the tensor has the keeper.
  bool is_kept_by(const at::Tensor& tensor) const;

 private:
  class Keeper;

  at::Tensor held_;
  c10::ScalarType dtype_ = c10::ScalarType::Float;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_{c10::intrusive_ptr<c10::StorageImpl>()};
  c10::weak_intrusive_ptr<c10::BackendMeta> keeper_{c10::intrusive_ptr<c10::BackendMeta>()};
};

}  // namespace zeropage::zero
