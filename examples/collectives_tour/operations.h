// Each operation of a communicator once, on values that show what it does.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <torch/torch.h>
#include <zeropage/zeropage.h>

namespace collectives_tour {

// The tensors of one rank, [numel] each. kNothing stands for room without a value.
struct Values {
  torch::Tensor before;
  torch::Tensor after;
  torch::Tensor expected;  // what `after` must be, found without the operation
};
inline constexpr float kNothing = -1;

struct Operation {
  std::string name;
  std::string what;  // it does, for people
  std::function<Values(zeropage::World&)> run;
};

// Rank r begins with 10 r, 10 r + 1, 10 r + 2 ..., an element a rank.
const std::vector<Operation>& operations();

}  // namespace collectives_tour
