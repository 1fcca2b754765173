// What data parallelism means, written with plain LibTorch only: N copies of a module, each on its
// samples, gradients averaged as the pairwise tree over ranks, one torch::optim step. What every
// stage must equal bit for bit.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace zeropage::testing {

// Samples of one rank in one step, for modules [batch, 7] -> [batch, 7].
struct Samples {
  torch::Tensor inputs;
  torch::Tensor targets;
};

inline Samples samples_of(int rank, int step, int64_t batch = 3) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(100 * step + rank + 1));
  return {torch::randn({batch, 7}, generator), torch::randn({batch, 7}, generator)};
}

inline torch::Tensor loss_of(const torch::Tensor& outputs, const Samples& samples) {
  return torch::mse_loss(outputs, samples.targets);
}

// Each parameter once. LibTorch lists a tied parameter under every name, and its optimizers would
// step it as often.
template <typename Module>
std::vector<torch::Tensor> distinct_parameters(const Module& module) {
  std::vector<torch::Tensor> distinct;
  for (const auto& parameter : module->parameters()) {
    const bool known =
        std::any_of(distinct.begin(), distinct.end(),
                    [&](const torch::Tensor& other) { return other.is_same(parameter); });
    if (!known) distinct.push_back(parameter);
  }
  return distinct;
}

// The sum over ranks of their gradients, as the pairwise tree; undefined if no rank has one.
inline torch::Tensor sum_of_gradients(const std::vector<torch::Tensor>& by_rank) {
  const auto like =
      std::find_if(by_rank.begin(), by_rank.end(), [](const auto& g) { return g.defined(); });
  if (like == by_rank.end()) return {};
  std::function<torch::Tensor(size_t, size_t)> sum = [&](size_t low, size_t high) {
    if (high - low == 1) return by_rank[low].defined() ? by_rank[low] : torch::zeros_like(*like);
    size_t half = 1;
    while (half * 2 < high - low) half *= 2;
    return sum(low, low + half) + sum(low + half, high);
  };
  return sum(0, by_rank.size());
}

// Their mean.
inline torch::Tensor mean_gradient(const std::vector<torch::Tensor>& by_rank) {
  const torch::Tensor sum = sum_of_gradients(by_rank);
  return sum.defined() ? sum / static_cast<int64_t>(by_rank.size()) : sum;
}

using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<torch::Tensor>)>;

// Trains `ranks` copies made by make_module (alike, by its seed) and returns rank 0's parameters.
// backward(rank, step, module) leaves that rank's gradients; by default one mse loss.
template <typename Module>
std::vector<torch::Tensor> train_reference(
    int ranks, int steps, const std::function<Module()>& make_module,
    const MakeOptimizer& make_optimizer,
    std::function<void(int, int, Module&)> backward = nullptr) {
  if (!backward) {
    backward = [](int rank, int step, Module& module) {
      const Samples samples = samples_of(rank, step);
      loss_of(module->forward(samples.inputs), samples).backward();
    };
  }
  std::vector<Module> modules;
  std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers;
  for (int rank = 0; rank < ranks; ++rank) {
    modules.push_back(make_module());
    optimizers.push_back(make_optimizer(distinct_parameters(modules.back())));
  }
  for (int step = 0; step < steps; ++step) {
    for (int rank = 0; rank < ranks; ++rank) {
      {
        const torch::NoGradGuard no_grad;
        auto from = modules[0]->buffers();
        auto to = modules[static_cast<size_t>(rank)]->buffers();
        for (size_t i = 0; rank > 0 && i < from.size(); ++i) to[i].copy_(from[i]);
      }
      optimizers[static_cast<size_t>(rank)]->zero_grad();
    }
    // Rank 0's forward changes its buffers, so all ranks must have taken them before.
    for (int rank = 0; rank < ranks; ++rank)
      backward(rank, step, modules[static_cast<size_t>(rank)]);
    const size_t count = distinct_parameters(modules[0]).size();
    for (size_t index = 0; index < count; ++index) {
      std::vector<torch::Tensor> gradients;
      for (auto& module : modules) gradients.push_back(distinct_parameters(module)[index].grad());
      const auto mean = mean_gradient(gradients);
      for (auto& module : modules) {
        distinct_parameters(module)[index].mutable_grad() =
            mean.defined() ? mean.clone() : torch::Tensor();
      }
    }
    for (auto& optimizer : optimizers) optimizer->step();
  }
  std::vector<torch::Tensor> result;
  for (const auto& parameter : modules[0]->parameters())
    result.push_back(parameter.detach().clone());
  return result;
}

// The same bits in every parameter.
inline ::testing::AssertionResult same_bits(const std::vector<torch::Tensor>& expected,
                                            const std::vector<torch::Tensor>& actual) {
  if (expected.size() != actual.size()) {
    return ::testing::AssertionFailure()
           << expected.size() << " and " << actual.size() << " parameters";
  }
  for (size_t index = 0; index < expected.size(); ++index) {
    if (torch::equal(expected[index], actual[index].detach())) continue;
    return ::testing::AssertionFailure()
           << "parameter " << index << " of sizes " << expected[index].sizes()
           << " differs by up to "
           << (expected[index] - actual[index].detach()).abs().max().item<double>();
  }
  return ::testing::AssertionSuccess();
}

}  // namespace zeropage::testing
