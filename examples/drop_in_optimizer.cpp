// A plain LibTorch script that became data parallel with sharded optimizer state by one line
// (marked). Try it alone, or with `zp run -n 4 -- drop_in_optimizer`: gradients are averaged over
// the ranks in step().
#include <cstdio>

#include <torch/torch.h>

#include "zero/zeropage.h"

int main() {
  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Linear(64, 256), torch::nn::ReLU(),
                            torch::nn::Linear(256, 1));

  // Before: torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));
  const auto world = zeropage::comm::World::from_environment();  // for the print below and the seed
  zeropage::Optimizer<torch::optim::AdamW> optimizer(net->parameters(), world,
                                                     torch::optim::AdamWOptions(1e-3));

  torch::manual_seed(world.rank());
  for (int step = 0; step < 200; ++step) {
    const auto x = torch::randn({32, 64});
    const auto y = torch::sin(x.sum(/*dim=*/1, /*keepdim=*/true));
    auto loss = torch::mse_loss(net->forward(x), y);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    if (world.rank() == 0 && step % 50 == 49) {
      std::printf("step %3d  loss %.4f\n", step + 1, loss.item<double>());
    }
  }
}
