// A complete LibTorch training loop that became data parallel by the line of its optimizer: parameter groups, a schedule,
// micro-batches, clipping, an average of the weights, evaluation, and a saved state that it goes on from.
//
//   cookbook_drop_in_optimizer run                      one rank
//   zp run -n 4 -- cookbook_drop_in_optimizer run       four; they share the batch
//
// The states lie in the folder `run`. Started again, on any number of ranks, it goes on from the last one.
#include <cstdio>
#include <exception>
#include <filesystem>
#include <memory>

#include <torch/optim/schedulers/step_lr.h>
#include <torch/torch.h>
#include <zeropage/zeropage.h>

constexpr int kSteps = 60, kMicroSteps = 2;
constexpr int64_t kBatch = 32;  // over all ranks, of a micro-batch

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    return last(torch::gelu(norm(torch::gelu(first(x)))));
  }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(16, 64));
  torch::nn::LayerNorm norm =
      register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({64})));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(64, 1));
};
TORCH_MODULE(Net);

// The same samples whatever the number of ranks; each takes its own.
torch::Tensor samples_of(int number, const zeropage::World& world) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(number));
  return torch::randn({kBatch, 16}, generator).chunk(world.size())[world.rank()];
}

torch::Tensor loss_on(Net& net, const torch::Tensor& x) {
  const torch::Tensor target = torch::tanh(x.narrow(1, 0, 1) - x.narrow(1, 1, 1));
  return torch::mse_loss(net->forward(x), target);
}

void train(const std::filesystem::path& folder) {
  const zeropage::World world = zeropage::World::from_environment();
  torch::manual_seed(1);  // each start has the same weights; ranks take rank 0's anyway
  Net net;

  // Weights are decayed, biases and norms are not.
  std::vector<torch::Tensor> decayed, others;
  for (const auto& parameter : net->parameters())
    (parameter.dim() > 1 ? decayed : others).push_back(parameter);
  using torch::optim::AdamWOptions;
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(decayed,
                      std::make_unique<AdamWOptions>(AdamWOptions(3e-3).weight_decay(0.1)));
  groups.emplace_back(others, std::make_unique<AdamWOptions>(AdamWOptions(3e-3).weight_decay(0)));

  // Before: torch::optim::AdamW optimizer(groups, AdamWOptions(3e-3));
  zeropage::Optimizer<torch::optim::AdamW> optimizer(groups, world, AdamWOptions(3e-3));

  // LibTorch's StepLR changes the rate one step later than the class of that name in Python.
  torch::optim::StepLR scheduler(optimizer, /*step_size=*/20, /*gamma=*/0.5);
  zeropage::WeightAverage average(optimizer, {.decay = 0.9});
  zeropage::StateSaver saver(folder, world, {.keep_last = 2});
  zeropage::RunState run{.average = &average, .scheduler = &scheduler};
  if (std::filesystem::exists(folder / "latest")) {
    zeropage::load_state(folder, net, optimizer, run);
    if (world.rank() == 0) std::printf("goes on from step %d\n", static_cast<int>(run.step));
  }

  while (run.step < kSteps) {
    net->train();
    optimizer.zero_grad();
    for (int micro = 0; micro < kMicroSteps; ++micro) {
      const int number = static_cast<int>(run.step) * kMicroSteps + micro;
      (loss_on(net, samples_of(number, world)) / kMicroSteps).backward();
    }
    // The norm of the mean over ranks. zeropage::clip_grad_norm_(optimizer, 1.0) gathers nothing for it.
    const double norm = torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0);
    optimizer.step();
    scheduler.step();
    average.update();
    ++run.step;

    if (run.step % 20 != 0) continue;
    average.swap_in();
    net->eval();
    const torch::NoGradGuard no_grad;
    const double loss = world.mean(loss_on(net, samples_of(1'000'000, world)).item<double>());
    average.swap_out();
    if (world.rank() == 0) {
      std::printf("step %3d  norm %.4f  loss of the average %.4f\n", static_cast<int>(run.step),
                  norm, loss);
    }
    saver.save(net, optimizer, run);
  }
  saver.wait();
}

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s FOLDER    (of the states, made where it is not there)\n",
                 argv[0]);
    return 2;
  }
  try {
    train(argv[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", zeropage::message_of(error).c_str());
    return 1;
  }
}
