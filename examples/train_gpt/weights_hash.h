// One number for all weights: what "the same bits" is checked by.
#pragma once

#include <string>

#include "zero/zeropage.h"

namespace train_gpt {

// SHA-256 of the weights as little-endian fp32, in named_parameters() order, in hexadecimal.
// Collective.
std::string weights_sha256(const zeropage::DataParallelBase& model);

}  // namespace train_gpt
