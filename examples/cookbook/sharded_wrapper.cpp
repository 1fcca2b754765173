// A training run as a cluster sees it: ZeRO-3 by the wrapper, parameter groups, a schedule, accumulation, clipping,
// an average of the weights, evaluation, and states from which a run that was stopped or killed goes on.
//
//   cookbook_sharded_wrapper run                        one rank
//   zp run -n 4 -- cookbook_sharded_wrapper run         four; they share the batch
//
// SIGTERM, as schedulers send it, and Ctrl-C save and end the run. Started again in the same folder, on any number of
// ranks that divides a micro-batch of 24, it goes on, and prints the same losses as a run that was never stopped.
#include <cmath>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <memory>
#include <numbers>

#include <torch/torch.h>
#include <zeropage/zeropage.h>

constexpr int kSteps = 100, kMicroSteps = 2, kWarmUp = 10;
constexpr int64_t kBatch = 24, kTokens = 64, kLength = 8;  // a batch: a micro-batch, over all ranks

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& tokens) {  // [batch, kLength] -> [batch, kTokens]
    const torch::Tensor x = torch::gelu(up(embedding(tokens).flatten(1)));
    return head(norm(x + torch::gelu(mix(x))));
  }
  torch::nn::Embedding embedding = register_module("embedding", torch::nn::Embedding(kTokens, 32));
  torch::nn::Linear up = register_module("up", torch::nn::Linear(kLength * 32, 128));
  torch::nn::Linear mix = register_module("mix", torch::nn::Linear(128, 128));
  torch::nn::LayerNorm norm =
      register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({128})));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(128, kTokens));
};
TORCH_MODULE(Net);
using Model = zeropage::DistributedDataParallel<Net>;

// Sequences that count in steps of 1 to 7. Every rank draws the whole batch and takes its part.
torch::Tensor samples_of(int64_t number, const zeropage::World& world) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(number));
  const torch::Tensor first = torch::randint(kTokens, {kBatch, 1}, generator);
  const torch::Tensor by = torch::randint(1, 8, {kBatch, 1}, generator);
  const torch::Tensor tokens = (first + by * torch::arange(kLength + 1)).remainder(kTokens);
  return tokens.chunk(world.size())[world.rank()];
}

torch::Tensor loss_on(Model& model, const torch::Tensor& tokens) {
  return torch::nn::functional::cross_entropy(model(tokens.narrow(1, 0, kLength)),
                                              tokens.select(1, kLength));
}

// A function of the step alone, so a state need not have it.
double learning_rate_at(int64_t step) {
  if (step < kWarmUp) return 5e-3 * static_cast<double>(step + 1) / kWarmUp;
  const double done = static_cast<double>(step - kWarmUp) / (kSteps - kWarmUp);
  return 5e-4 + 4.5e-3 * (1 + std::cos(std::numbers::pi * done)) / 2;
}

double evaluate(Model& model, zeropage::WeightAverage& average) {
  const torch::NoGradGuard no_grad;
  average.swap_in();
  model.eval();
  const torch::Tensor loss = loss_on(model, samples_of(1'000'000, model.world()));
  model.train();
  average.swap_out();
  return model.world().mean(loss.item<double>());
}

int train(const std::filesystem::path& folder) {
  const zeropage::World world = zeropage::World::from_environment();
  torch::set_num_threads(1);
  torch::manual_seed(1);

  zeropage::Options options;
  options.stage = zeropage::Stage::kParameters;
  Model model(Net(), world, options);

  // Matrices are decayed, biases and norms are not.
  std::vector<torch::Tensor> decayed, others;
  for (const auto& parameter : model.parameters())
    (parameter.dim() > 1 ? decayed : others).push_back(parameter);
  using torch::optim::AdamWOptions;
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(decayed, std::make_unique<AdamWOptions>(AdamWOptions().weight_decay(0.1)));
  groups.emplace_back(others, std::make_unique<AdamWOptions>(AdamWOptions().weight_decay(0)));
  zeropage::Optimizer<torch::optim::AdamW> optimizer(model, groups);

  zeropage::Accumulator accumulator(model, {.micro_steps = kMicroSteps, .clip_norm = 1.0});
  zeropage::WeightAverage average(model, {.decay = 0.9});
  zeropage::check_can_save(folder, model, optimizer);
  zeropage::StateSaver saver(folder, model.all_ranks(), {.keep_last = 2, .on_signal = true});
  zeropage::RunState run{.accumulator = &accumulator, .average = &average};
  if (std::filesystem::exists(folder / "latest")) {
    zeropage::load_state(folder, model, optimizer, run);
    if (world.rank() == 0) std::printf("goes on from step %d\n", static_cast<int>(run.step));
  }

  while (run.step < kSteps) {
    for (auto& group : optimizer.param_groups()) group.options().set_lr(learning_rate_at(run.step));
    for (int64_t micro = 0; micro < kMicroSteps; ++micro) {
      // The mean over this micro-batch, undivided: the accumulator makes the mean over all of them.
      accumulator.backward(loss_on(model, samples_of(run.step * kMicroSteps + micro, world)));
    }
    const zeropage::StepReport report = accumulator.step(optimizer);  // clips, and zeroes gradients
    average.update();
    ++run.step;

    if (const int signal = saver.stop_signal(); signal != 0) {  // of any rank; the same on all
      saver.save(model, optimizer, run);
      saver.wait();
      if (world.rank() == 0) std::printf("stopped after step %d\n", static_cast<int>(run.step));
      return 128 + signal;
    }
    if (run.step % 20 != 0) continue;
    const double loss = evaluate(model, average);
    if (world.rank() == 0) {
      std::printf("step %3d  norm %.4f  loss of the average %.4f\n", static_cast<int>(run.step),
                  report.norm, loss);
      std::fflush(stdout);
    }
    saver.save(model, optimizer, run);
  }
  saver.wait();
  return 0;
}

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s FOLDER    (of the states, made where it is not there)\n",
                 argv[0]);
    return 2;
  }
  try {
    return train(argv[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", zeropage::message_of(error).c_str());
    return 1;
  }
}
