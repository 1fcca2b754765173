#include <iostream>
#include <zero/zeropage.h>

#include <torch/torch.h>

int main() {
  const auto world = zeropage::World::from_environment();
  zeropage::DistributedDataParallel<torch::nn::Linear> model(torch::nn::Linear(8, 8), world);
  zeropage::Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(1e-3));
  auto loss = model(torch::ones({4, 8})).pow(2).mean();
  loss.backward();
  optimizer.step();
  std::cout << "rank " << world.rank() << " of " << world.size() << " trained a step, loss "
            << loss.item<double>() << std::endl;
}
