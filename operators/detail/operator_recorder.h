// Runs the operators of one thread on the meta device and writes them on a tape.
//
// Three ways an operator can go. One whose tensors all have values runs as it is: it costs what
// the plain constructor pays. One that only looks at storages (a view, a question about a shape)
// runs on meta and is forgotten, for views are rebuilt from their geometry. The others run on meta
// and are recorded; a real tensor among their arguments is captured, and a meta tensor stands in
// for it.
//
// Lifetime: the tape outlives the recorder.
// Threads: one recorder a thread, and it sees that thread alone.
// Throws c10::Error, naming the operator, for what cannot be deferred.
#pragma once

#include <unordered_map>

#include <ATen/core/stack.h>

#include "operators/detail/operator_call.h"
#include "operators/detail/random_states.h"
#include "operators/detail/recorded_operator.h"
#include "operators/operator_interceptor.h"

namespace zeropage::operators::detail {

class OperatorRecorder final : public OperatorInterceptor {
 public:
  explicit OperatorRecorder(Tape& tape) : tape_(tape), random_(tape.random) {}

  // Whether the calling thread records a construction.
  static bool records();

  void run(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
           torch::jit::Stack& stack) override;
  // The constructor is through.
  void finish() { random_.finish(); }

 private:
  // What the operator gets, before it runs.
  RecordedOperator describe_call(const OperatorCall& call);
  // Makes its arguments such that it runs on meta.
  void move_to_meta(const OperatorCall& call);
  // What it gave, after it ran.
  void note_results(const OperatorCall& call, RecordedOperator& recorded);
  void note_effects(const OperatorCall& call, RecordedOperator& recorded) const;
  // The number of the storage that a tensor, meta or real, lies on.
  size_t storage_of(const at::Tensor& tensor, const OperatorCall& call);
  size_t capture(const at::Tensor& real);

  Tape& tape_;
  RandomRecorder random_;
  std::unordered_map<const c10::StorageImpl*, size_t> captured_;  // real storages
};

}  // namespace zeropage::operators::detail
