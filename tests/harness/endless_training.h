// Ranks that train until something ends them.
#pragma once

#include <functional>

#include <torch/torch.h>

#include "zeropage/bytes.h"
#include "zeropage/zeropage.h"

namespace zeropage::testing {

// Steps a small net of several pages. before_step: called with the number of the step.
[[noreturn]] inline void train_endlessly(
    const comm::World& world, int stage, const std::function<void(int)>& before_step = [](int) {}) {
  torch::nn::Sequential net(torch::nn::Linear(64, 512), torch::nn::Tanh(),
                            torch::nn::Linear(512, 64));
  Options options;
  options.stage = stage_of(stage);
  options.page_bytes = memory::operator""_KiB(64);
  DistributedDataParallel<torch::nn::Sequential> model(net, world, options);
  Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(1e-3));
  for (int step = 0;; ++step) {
    before_step(step);
    optimizer.zero_grad();
    model(torch::randn({4, 64})).pow(2).sum().backward();
    optimizer.step();
  }
}

}  // namespace zeropage::testing
