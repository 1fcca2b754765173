// A continuation drawn from the trained model.
#pragma once

#include <string>

#include "bench/train_gpt/text_data.h"
#include "examples/byte_gpt/gpt.h"
#include "zeropage/zeropage.h"

namespace train_gpt {

// Draws `count` bytes after a prompt of the held-out text, at temperature 0.8. The same on every
// rank.
std::string sample_text(zeropage::DistributedDataParallel<Gpt>& model, const TextData& data,
                        int64_t count, uint64_t seed);

}  // namespace train_gpt
