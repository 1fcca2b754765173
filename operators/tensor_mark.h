// A mark on a tensor: what sees each operator that takes the tensor, and may run something else in
// its place.
//
// A marked tensor carries the trap's dispatch key (dispatch_keys.h) beside those that it has, so
// every operator on it comes to paging/trap, which asks the mark first. The mark lies on the
// TensorImpl: the same parameter has it whatever memory it is given, and detach() hands it on. Other
// views, copies and clones have none.
//
// Lifetime: the tensor owns its mark.
// Threads: a mark is set while no other thread uses the tensor. Operators run on any thread, those of
// backward on autograd's.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include <ATen/core/TensorBody.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

namespace zeropage::operators {

class TensorMark : public c10::BackendMeta {
 public:
  enum class On : uint8_t { kParameter, kBuffer };

  // who: names the tensor and what marked it, for errors.
  TensorMark(std::string who, On on) : who_(std::move(who)), on_(on) {}

  // Whether run() may run something in that operator's place.
  virtual bool replaces(const c10::OperatorHandle& handle) const = 0;

  // Before an operator that takes `marked`, which is the tensor or what detach() made of it. true: it has run something in the operator's place,
  // taken the arguments from the end of the stack and left the results there. What it runs is seen as
  // any operator is, by marks too.
  virtual bool run(const c10::OperatorHandle& handle, const at::Tensor& marked,
                   torch::jit::Stack& stack) = 0;

  const std::string& who() const { return who_; }
  On on() const { return on_; }

  // The call gets each operator on the tensor that is not part of another, before it runs. reads: it takes a tensor
  // of these, or of a page, for more than to write to it. Empty: it gets none.
  using BeforeUse = std::function<void(const c10::OperatorName& operation, bool reads)>;
  void follow(std::shared_ptr<const BeforeUse> call) { before_use_ = std::move(call); }
  void announce(const c10::OperatorName& operation, bool reads) const {
    if (before_use_ == nullptr) return;
    // It may set another.
    if (const BeforeUse call = *before_use_) call(operation, reads);
  }

  // A TensorImpl has one place for a mark and for what else its tensors are to keep alive.
  void keep(c10::intrusive_ptr<c10::BackendMeta> other) { kept_ = std::move(other); }
  const c10::BackendMeta* kept() const { return kept_.get(); }

 private:
  const std::string who_;
  const On on_;
  c10::intrusive_ptr<c10::BackendMeta> kept_;
  std::shared_ptr<const BeforeUse> before_use_;
};

// Throws if the tensor has another mark already.
void set_mark(const at::Tensor& tensor, c10::intrusive_ptr<TensorMark> mark);
// Null without one.
TensorMark* mark_of(const at::Tensor& tensor);

// Whether the mark of an argument may run something else in the operator's place. Whoever records operators
// records that, not this one.
bool is_replaced(const c10::OperatorHandle& handle, at::ArrayRef<c10::IValue> arguments);

// Gives the tensor the trap's key. The TensorImpl stays the same object.
void add_trap_key(const at::Tensor& tensor);
// Whether its memory may be a page's, which comes and goes: it carries the key, and not because of a
// mark on a buffer.
bool may_be_paged(const at::Tensor& tensor);

}  // namespace zeropage::operators
