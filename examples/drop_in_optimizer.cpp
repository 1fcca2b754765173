// A plain LibTorch script that became data parallel with sharded optimizer state by changing one
// line, the optimizer's. Try it alone, or with `zp run -n 4 -- drop_in_optimizer`: backward()
// averages gradients over the ranks.
#include <cstdio>
#include <cstdlib>
#include <exception>

#include <torch/torch.h>
#include <zeropage/zeropage.h>

void train() {
  const char* rank_variable = std::getenv("RANK");  // set by launchers
  const int rank = rank_variable == nullptr ? 0 : std::atoi(rank_variable);
  torch::nn::Sequential net(torch::nn::Linear(64, 256), torch::nn::ReLU(),
                            torch::nn::Linear(256, 1));
  const torch::optim::AdamWOptions options(1e-3);

  // Before: torch::optim::AdamW optimizer(net->parameters(), options);
  zeropage::Optimizer<torch::optim::AdamW> optimizer(net->parameters(),
                                                     zeropage::World::from_environment(), options);

  torch::manual_seed(rank);  // every rank draws its own samples
  for (int step = 0; step < 200; ++step) {
    const auto x = torch::randn({32, 64});
    const auto y = torch::tanh(x.narrow(1, 0, 1) - x.narrow(1, 1, 1));
    auto loss = torch::mse_loss(net->forward(x), y);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    if (rank == 0 && step % 50 == 49)
      std::printf("step %3d  loss %.4f\n", step + 1, loss.item<double>());
  }
}

int main() {
  try {
    train();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", zeropage::message_of(error).c_str());
    return 1;
  }
}
