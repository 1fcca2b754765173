// Must not compile: see tests/CMakeLists.txt.
#include "zeropage/zeropage.h"

void refused(const std::vector<at::Tensor>& parameters, const zeropage::comm::World& world) {
  zeropage::Optimizer<torch::optim::LBFGS> optimizer(parameters, world,
                                                     torch::optim::LBFGSOptions(1.0));
}
