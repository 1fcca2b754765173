// How Zeropage itself makes the updates of an optimizer's class (zeropage/optimizer.h names the classes).
#pragma once

#include <cstdint>
#include <memory>

#include "optim/tensor_form.h"
#include "zero/update/page_update.h"

namespace zeropage::zero {

struct FusedForm {
  MakePageUpdate make;
  int64_t states = 0;  // that it keeps, of the parameters' size
  // What becomes of directions between two passes; null: all its updates have one.
  std::shared_ptr<const optim::TensorForm> tensors = nullptr;
};

}  // namespace zeropage::zero
