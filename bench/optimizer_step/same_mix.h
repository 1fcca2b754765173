// What touches memory as a step of AdamW does and computes next to nothing: it multiplies what it
// writes by `one` and adds the gradient times `zero`, which the compiler does not know.
#pragma once

#include <cstdint>

namespace optimizer_step {

struct SameMix {
  float* values;
  const float* gradient;
  float* states[2];
  int64_t numel;
  float one = 1;
  float zero = 0;
};

// Elements [begin, end), by the widest vectors of the processor.
void touch_on_cpu(const SameMix& mix, int64_t begin, int64_t end);

// On that cudaStream_t. Without CUDA (same_mix_no_cuda.cpp) it throws.
void touch_on_cuda(const SameMix& mix, void* stream);

}  // namespace optimizer_step
