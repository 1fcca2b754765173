// Tells which operator a thread runs, and of which module (memory/operator_label.h), while a model's memory is limited.
//
// C++ modules have no hooks. So an operator belongs to the module whose parameter it takes; one that takes none is told as
// what comes after the module whose parameter was read last.
//
// LibTorch tells of operators by its record functions. Those of a thread are told from the first forward there on; autograd's
// threads are told as the thread that calls backward.
// Lifetime: its parameters outlive it, or their tensors are no longer used. Threads: any; a thread stops telling when the
// OperatorLabels ends on it. Cost: about a microsecond an operator.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "memory/operator_label.h"

namespace zeropage::operators {

class OperatorLabels {
 public:
  struct Parameter {
    std::string name;  // "blocks.3.up.weight"
    at::Tensor tensor;
  };

  explicit OperatorLabels(const std::vector<Parameter>& parameters);
  ~OperatorLabels();
  OperatorLabels(const OperatorLabels&) = delete;
  OperatorLabels& operator=(const OperatorLabels&) = delete;

  // The calling thread is in that phase of a step from here on, and its operators are told.
  void begin(memory::StepPhase phase);

 private:
  struct Shared;

  const std::shared_ptr<Shared> shared_;
};

}  // namespace zeropage::operators
