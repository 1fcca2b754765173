// What the calling thread computes, as errors about memory tell it: an operator, and the module whose parameters it reads.
// operators/operator_labels.h says so while a model's memory is limited.
#pragma once

#include <cstdint>

namespace zeropage::memory {

enum class StepPhase : uint8_t { kOther, kForward, kLoss, kBackward };

struct OperatorLabel {
  // LibTorch's name of an operator, "aten::linear"; "": none runs, or nobody tells. Lives as long as the process.
  const char* name = "";
  // The path of a module, "blocks.3.up"; "": none yet. Lives as long as the process.
  const char* module = "";
  // The operator reads a parameter of that module. If not, that module's parameters were the last that were read.
  bool is_of_module = false;
  StepPhase phase = StepPhase::kOther;

  bool operator==(const OperatorLabel&) const = default;
};

inline OperatorLabel& operator_label() {
  thread_local OperatorLabel label;
  return label;
}

}  // namespace zeropage::memory
