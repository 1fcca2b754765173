// A script of plain data parallelism, trained on two local ranks: `quickstart`, or `zp run -n 4 --
// quickstart`.
#include <cstdio>
#include <exception>

#include <torch/torch.h>
#include <zeropage/zeropage.h>

struct NetImpl : torch::nn::Module {
  NetImpl() {
    hidden = register_module("hidden", torch::nn::Linear(64, 256));
    output = register_module("output", torch::nn::Linear(256, 1));
  }
  torch::Tensor forward(const torch::Tensor& x) { return output(torch::relu(hidden(x))); }
  torch::nn::Linear hidden{nullptr}, output{nullptr};
};
TORCH_MODULE(Net);

int train(zeropage::World& world) {
  torch::set_num_threads(1);
  zeropage::Options options;
  options.stage = zeropage::Stage::kOptimizerState;  // ZeRO-1
  zeropage::DistributedDataParallel<Net> model(Net(), world, options);
  zeropage::Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(1e-3));

  torch::manual_seed(world.rank());  // every rank draws its own samples of one function
  for (int step = 0; step < 200; ++step) {
    const auto x = torch::randn({32, 64});
    const auto y = torch::tanh(x.narrow(1, 0, 1) - x.narrow(1, 1, 1));
    auto loss = torch::mse_loss(model(x), y);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    if (world.rank() == 0 && step % 50 == 49) {
      std::printf("step %3d  loss %.4f\n", step + 1, loss.item<double>());
    }
  }
  return 0;
}

int main() {
  try {
    if (zeropage::launched_by_environment()) {
      auto world = zeropage::World::from_environment();
      return train(world);
    }
    return zeropage::World::launch(/*ranks=*/2, train);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", zeropage::message_of(error).c_str());
    return 1;
  }
}
