// What a checkpointed region may be asked for, and how its function gets its inputs again.
#pragma once

#include <functional>
#include <string>

#include <ATen/core/Tensor.h>

namespace zeropage::checkpointing {

struct RegionOptions {
  std::string name;
  bool preserve_random_state;
  bool early_stop;
  bool check_geometry;
  bool check_values;
};

// Gives the inputs, in the order in which they were kept.
using NextInput = std::function<at::Tensor()>;

}  // namespace zeropage::checkpointing
