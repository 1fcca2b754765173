#include "tests/simulated/training.h"

#include <map>
#include <mutex>
#include <optional>

#include <torch/torch.h>

#include "zeropage/zeropage.h"

namespace zeropage::simulated {
namespace {

constexpr int64_t kIn = 24, kHidden = 40, kOut = 32, kBatch = 2;
constexpr int64_t kPageBytes = 4096;
constexpr uint64_t kHashStart = 1469598103934665603U, kHashFactor = 1099511628211U;

// A number in [-1, 1), of which all ranks and all starts have the same.
float number_of(uint64_t a, uint64_t b, uint64_t c) {
  uint64_t bits = kHashStart;
  for (const uint64_t part : {a, b, c}) {
    bits = (bits ^ part) * 0x9e3779b97f4a7c15U;
    bits ^= bits >> 29;
  }
  return static_cast<float>(bits >> 40) / static_cast<float>(1 << 23) - 1;
}

at::Tensor numbers(std::vector<int64_t> sizes, uint64_t a, uint64_t b) {
  at::Tensor made = at::empty(sizes, at::kFloat);
  float* const at = made.data_ptr<float>();
  for (int64_t i = 0; i < made.numel(); ++i) at[i] = number_of(a, b, static_cast<uint64_t>(i));
  return made;
}

// The last columns of its input multiply what is hidden, as dropout does. LibTorch's generator is the process's, and ranks here are threads.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(uint64_t seed) : first(kIn, kHidden), second(kHidden, kOut) {
    register_module("first", first);
    register_module("second", second);
    const torch::NoGradGuard no_grad;
    uint64_t number = 0;
    for (at::Tensor& parameter : parameters()) {
      parameter.copy_(numbers(parameter.sizes().vec(), seed, 1000 + number++) / 2);
    }
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor hidden = torch::tanh(first(x.narrow(1, 0, kIn)));
    return second(hidden * x.narrow(1, kIn, kHidden));
  }
  torch::nn::Linear first, second;
};
TORCH_MODULE(Net);

at::Tensor batch_of(const Training& training, int rank, int64_t step, int micro_step) {
  const auto which = static_cast<uint64_t>((step * 16 + rank) * 4 + micro_step);
  const at::Tensor x = numbers({kBatch, kIn}, training.model_seed, 2 * which);
  at::Tensor kept = at::ones({kBatch, kHidden});
  if (training.drops_out) {
    kept = (numbers({kBatch, kHidden}, 7, 2 * which + 1) > -0.5).to(at::kFloat) / 0.75;
  }
  return at::cat({x, kept}, 1);
}

Ending ending_of(const DistributedDataParallel<Net>& model, int64_t step, int64_t noted) {
  const GatheredParameters whole(model);
  uint64_t hash = kHashStart;
  for (const auto& parameter : model.parameters()) {
    const at::Tensor values = parameter.detach().to(at::kFloat).contiguous();
    const auto* const bytes = static_cast<const unsigned char*>(values.data_ptr());
    for (size_t i = 0; i < values.nbytes(); ++i) hash = (hash ^ bytes[i]) * kHashFactor;
  }
  return {.hash = hash, .step = step, .noted = noted};
}

// Calls `each` with what a run of so many steps would end with.
Ending train_and_show(comm::World& world, SurvivingRun* run, const Training& training,
                      int64_t steps, const Hooks& hooks,
                      const std::function<void(const Ending&)>& each) {
  DistributedDataParallel<Net> model(
      Net(training.model_seed), world,
      Options{.stage = stage_of(training.stage), .page_bytes = kPageBytes});
  Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(1e-2));
  std::optional<Accumulator> accumulator;
  RunState state;
  if (training.micro_steps > 1) {
    accumulator.emplace(model, AccumulatorOptions{.micro_steps = training.micro_steps});
    state.accumulator = &*accumulator;
  }
  int64_t noted = 0;
  state.extras["noted"] = {[&] { return std::to_string(noted); },
                           [&](const std::string& text) { noted = std::stoll(text); }};
  hooks.resumes();
  if (run != nullptr) run->resume(model, optimizer, state);
  hooks.resumed(state.step);
  const auto loss_of = [&](int micro_step) {
    return model(batch_of(training, world.rank(), state.step, micro_step)).pow(2).mean();
  };
  while (state.step < steps) {
    hooks.before_step(state.step);
    if (accumulator) {
      for (int micro = 0; micro < training.micro_steps; ++micro) {
        accumulator->backward(loss_of(micro));
      }
      accumulator->step(optimizer);
    } else {
      optimizer.zero_grad();
      loss_of(0).backward();
      optimizer.step();
    }
    ++noted;
    ++state.step;
    hooks.after_step(state.step);
    if (run != nullptr) run->end_step(model, optimizer, state);
    if (each) each(ending_of(model, state.step, noted));
  }
  return ending_of(model, state.step, noted);
}

std::map<int64_t, Ending> endings_of(const Training& training) {
  std::map<int64_t, Ending> endings;
  comm::World::threads(training.ranks, [&](comm::World& world) {
    train_and_show(world, nullptr, training, kMostSteps, {}, [&](const Ending& ending) {
      if (world.rank() == 0) endings[ending.step] = ending;
    });
  });
  return endings;
}

}  // namespace

Ending train(comm::World& world, SurvivingRun* run, const Training& training, int64_t steps,
             const Hooks& hooks) {
  return train_and_show(world, run, training, steps, hooks, {});
}

Ending unbroken_ending(const Training& training, int64_t steps) {
  static std::mutex mutex;
  static std::map<Training, std::map<int64_t, Ending>> known;
  const std::lock_guard lock(mutex);
  Training alike = training;
  // From stage 2 on ranks add up each micro-step's gradients, and below those of the step.
  alike.stage = training.micro_steps > 1 && training.stage >= 2 ? 2 : 0;
  auto& endings = known[alike];
  if (endings.empty()) endings = endings_of(alike);
  return endings.at(steps);
}

}  // namespace zeropage::simulated
