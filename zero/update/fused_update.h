// Updates in one pass over memory (optim/fused_step): the formulas of the torch::optim class,
// rounded otherwise, with the same bits on the host and on CUDA. zeropage/optimizer.h names the
// classes that have such a form; fused_update.cpp instantiates it for them.
#pragma once

#include <string>

#include "zero/update/fused_form.h"

namespace zeropage::zero {

// The classes that have one, for errors: "AdamW, Adam and SGD".
std::string names_with_fused_form();

}  // namespace zeropage::zero
