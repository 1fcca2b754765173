// What optimizer_step times: groups of contenders over the same tensors, and which of their times
// are compared.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "bench/interleaved.h"

namespace optimizer_step {

struct Ratio {
  std::string name;
  size_t slow;      // the contender whose seconds stand above the line
  size_t fast;      // and below it
  double goal = 0;  // reached by a median of no less; 0: none
};

struct Group {
  std::string name;
  int64_t numel = 0;
  std::vector<bench::Contender> contenders;
  std::vector<int64_t> bytes;  // of each, an element
  std::vector<Ratio> ratios;   // above 1: the first named is faster
};

// AdamW over one flat stretch: the step, with what precedes and follows it, against LibTorch's calls
// and against memory. 24 bytes an element.
Group flat_group(const c10::Device& device, int64_t numel);

// AdamW over `count` tensors of 1,000 elements, each with memory of its own, against one flat stretch
// of as many elements. 32 bytes an element.
Group list_group(const c10::Device& device, int64_t count);

// AdamW over one flat stretch on the CPU, with fp32 and with 8-bit states, by each set of instructions
// that the loops may use here (optim/cpu/instructions.h). 26 bytes an element.
Group instructions_group(int64_t numel);

}  // namespace optimizer_step
