// A whole training script: a GPT over the bytes of a text, with all that is trained sharded over ranks (ZeRO-3),
// micro-batches, clipping, a learning rate that warms up and decays, blocks computed again in backward, evaluation, and a
// run that goes on where it was ended.
//
//   gpt TEXT [RUN]                   two local ranks; states go to the folder RUN, ./gpt-run unless told
//   zp run -n 4 -- gpt TEXT [RUN]    as many ranks as the launcher starts
//
// Ctrl-C saves and ends; the same call goes on from there, also with another number of ranks.
#include "byte_gpt/gpt.h"

#include <cmath>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <numbers>
#include <string>

#include <torch/torch.h>
#include <zeropage/state_folder.h>
#include <zeropage/zeropage.h>

constexpr int64_t kSteps = 400, kMicroSteps = 2, kBatch = 8, kLength = 64;
constexpr int64_t kEvery = 50;  // steps between two evaluations, and two states
constexpr double kLearningRate = 1e-3, kWarmUp = 20;

double learning_rate(int64_t step) {
  const double warm = std::min(1.0, static_cast<double>(step + 1) / kWarmUp);
  const double decay = 0.5 * (1 + std::cos(std::numbers::pi * step / kSteps));
  return kLearningRate * warm * (0.1 + 0.9 * decay);
}

torch::Tensor read_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, "cannot read ", path);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  TORCH_CHECK(text.size() > 20 * kLength, path, " has ", text.size(), " bytes; at least ",
              20 * kLength, " are needed");
  return torch::tensor(
             c10::ArrayRef<uint8_t>(reinterpret_cast<const uint8_t*>(text.data()), text.size()))
      .to(torch::kInt64);
}

// Stretches of `text` at places that are drawn from `seed`: [kBatch, kLength + 1].
torch::Tensor stretches(const torch::Tensor& text, uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const auto begins = torch::randint(text.size(0) - kLength, {kBatch}, generator);
  std::vector<torch::Tensor> rows;
  for (int64_t row = 0; row < kBatch; ++row) {
    const int64_t begin = begins[row].item<int64_t>();
    rows.push_back(text.slice(0, begin, begin + kLength + 1));
  }
  return torch::stack(rows);
}

using Model = zeropage::DistributedDataParallel<train_gpt::Gpt>;

torch::Tensor loss_of(Model& model, const torch::Tensor& tokens) {
  return train_gpt::next_token_loss(model(tokens.slice(1, 0, -1)), tokens.slice(1, 1));
}

// The mean over the ranks of the loss on text that is not trained on.
double evaluate(Model& model, const torch::Tensor& text, const zeropage::World& world) {
  const torch::NoGradGuard no_grad;
  model->eval();
  const auto loss = loss_of(model, stretches(text, /*seed=*/1'000'000 + world.rank()));
  model->train();
  return world.mean(loss.item<double>());
}

int train(zeropage::World& world, const std::string& text_file, const std::string& run) {
  torch::set_num_threads(1);
  const auto text = read_bytes(text_file);
  const int64_t held_out = text.size(0) / 10;
  const auto training = text.slice(0, held_out), validation = text.slice(0, 0, held_out);

  const train_gpt::GptConfig config{.d_model = 128, .layers = 4, .heads = 4, .sequence = kLength};
  train_gpt::Gpt module(config, /*seed=*/1);
  module->run_blocks_by([](const torch::nn::ModuleList& blocks, torch::Tensor x) {
    return zeropage::checkpoint_each<train_gpt::Block>(blocks, zeropage::EveryBlocks::each(), x);
  });
  Model model(module, world, {.stage = zeropage::Stage::kParameters});
  zeropage::Optimizer<torch::optim::AdamW> optimizer(model,
                                                     torch::optim::AdamWOptions(kLearningRate));
  zeropage::Accumulator accumulator(model, {.micro_steps = kMicroSteps, .clip_norm = 1.0});

  zeropage::StateSaver saver(run, world, {.keep_last = 2, .on_signal = true});
  zeropage::RunState at{.accumulator = &accumulator};
  if (zeropage::state::newest_step_in(run)) {
    zeropage::load_state(run, model, optimizer, at);
    if (world.rank() == 0)
      std::printf("goes on behind step %lld\n", static_cast<long long>(at.step));
  }
  while (at.step < kSteps && !saver.stop_requested()) {
    for (auto& group : optimizer.param_groups()) group.options().set_lr(learning_rate(at.step));
    for (int64_t micro = 0; micro < kMicroSteps; ++micro) {
      // Other samples in each micro-batch of each rank, and the same ones when a run is repeated.
      const uint64_t seed = (at.step * kMicroSteps + micro) * world.size() + world.rank();
      accumulator.backward(loss_of(model, stretches(training, seed)));
    }
    const auto report = accumulator.step(optimizer);
    if (++at.step % kEvery != 0) continue;
    const double validation_loss = evaluate(model, validation, world);
    saver.save(model, optimizer, at);
    if (world.rank() == 0) {
      std::printf("step %4lld  loss %.3f  validation %.3f  norm %.3f\n",
                  static_cast<long long>(at.step), accumulator.loss().item<double>(),
                  validation_loss, report.norm);
    }
  }
  if (at.step % kEvery != 0) saver.save(model, optimizer, at);  // ended by a signal
  saver.wait();
  return 0;
}

int main(int count, char** arguments) {
  if (count < 2 || count > 3) {
    std::fprintf(stderr, "usage: gpt TEXT [RUN]\n");
    return 2;
  }
  const std::string text = arguments[1], run = count == 3 ? arguments[2] : "gpt-run";
  try {
    if (zeropage::launched_by_environment()) {
      auto world = zeropage::World::from_environment();
      return train(world, text, run);
    }
    return zeropage::World::launch(
        /*ranks=*/2, [&](zeropage::World& world) { return train(world, text, run); });
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", zeropage::message_of(error).c_str());
    return 1;
  }
}
