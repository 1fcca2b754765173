// Updates in one pass over memory (optim/fused_step): the formulas of the torch::optim class,
// rounded otherwise, with the same bits on the host and on CUDA. zeropage/optimizer.h names the
// classes that have such a form; fused_update.cpp instantiates it for them.
#pragma once

#include <cstdint>
#include <string>

#include "zero/update/page_update.h"

namespace zeropage {

struct FusedForm {
  MakePageUpdate make;
  int64_t states = 0;  // that it keeps, of the parameters' size
};

// The classes that have one, for errors: "AdamW, Adam and SGD".
std::string names_with_fused_form();

}  // namespace zeropage
