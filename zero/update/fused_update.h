// Updates in one pass over memory (optim/fused_step): the formulas of the torch::optim class,
// rounded otherwise, with the same bits on the host and on CUDA. zeropage/optimizer.h names the
// classes that have such a form; fused_update.cpp instantiates it for them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "optim/tensor_form.h"
#include "zero/update/page_update.h"

namespace zeropage {

struct FusedForm {
  MakePageUpdate make;
  int64_t states = 0;  // that it keeps, of the parameters' size
  // What becomes of directions between two passes; null: all its updates have one.
  std::shared_ptr<const offload::TensorForm> tensors = nullptr;
};

// The classes that have one, for errors: "AdamW, Adam and SGD".
std::string names_with_fused_form();

}  // namespace zeropage
