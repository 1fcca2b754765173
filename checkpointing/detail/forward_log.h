// Writes down what a forward does: its operators, what they read, and the values that they make.
//
// Lifetime: the values of the forward hold what they need of it; it may go before them.
// Threads: the forward's, and the tape's mutex is held.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "checkpointing/detail/operator_facts.h"
#include "checkpointing/detail/recorded_forward.h"
#include "checkpointing/detail/step_meter.h"
#include "checkpointing/detail/thread_modes.h"
#include "checkpointing/detail/value_table.h"

namespace zeropage::checkpointing::detail {

class ForwardLog {
 public:
  // least_bytes: smaller values are kept where they cannot be made again. meter: told all of it; null: nobody
  // measures. Outlives the log.
  ForwardLog(int64_t least_bytes, StepMeter* meter) : least_bytes_(least_bytes), meter_(meter) {}

  // The operator is about to run; what is saved from here to end_operator() is saved within it.
  std::shared_ptr<Operation> begin_operator(const c10::OperatorHandle& handle,
                                            const OperatorFacts& facts,
                                            at::ArrayRef<c10::IValue> arguments);
  // It has run. An operator that threw has none.
  void note_results(const std::shared_ptr<Operation>& operation, at::ArrayRef<c10::IValue> results);
  void end_operator() { current_.reset(); }
  // Autograd saves the tensor. Null where a value and a geometry do not describe it.
  std::shared_ptr<Value> note_saved(const at::Tensor& tensor);
  void end_forward();

  const ValueTable& values() const { return values_; }
  size_t operators() const { return operators_; }
  double flops() const { return flops_; }

 private:
  // What it takes to draw the same numbers again.
  static void note_draw(const c10::OperatorHandle& handle, at::ArrayRef<c10::IValue> arguments,
                        Operation& operation);
  Operation::Tensor record_tensor(const at::Tensor& tensor, Operation& operation);
  void make_room_for_writes(const OperatorFacts& facts, at::ArrayRef<c10::IValue> arguments,
                            const std::shared_ptr<Operation>& operation);
  std::shared_ptr<Value> add(const at::Tensor& tensor, Value::Source source,
                             std::shared_ptr<Operation> producer);
  const std::shared_ptr<const ThreadModes>& modes_now();

  const int64_t least_bytes_;
  StepMeter* const meter_;

  ValueTable values_;
  std::shared_ptr<Operation> current_;
  std::vector<std::pair<std::shared_ptr<Value>, at::Tensor>> written_;  // by the current operator
  std::shared_ptr<const ThreadModes> modes_;
  size_t operators_ = 0;
  double flops_ = 0;
};

}  // namespace zeropage::checkpointing::detail
