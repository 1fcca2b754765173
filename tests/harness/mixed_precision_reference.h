// What mixed precision means, written with plain LibTorch only: N copies of a module in a lower
// precision, fp32 master weights that AdamW steps with the mean gradient, and are rounded into the
// copies. What every stage must equal bit for bit.
#pragma once

#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "tests/harness/reference.h"

namespace zeropage::testing {

// Modules draw from the one generator of the process, and ranks are threads of it.
inline std::mutex& generator_mutex() {
  static std::mutex mutex;
  return mutex;
}

template <typename Module>
Module make() {
  const std::lock_guard lock(generator_mutex());
  torch::manual_seed(7);
  return Module();
}

inline Samples samples_in(int rank, int step, torch::ScalarType dtype) {
  const Samples samples = samples_of(rank, step);
  return {samples.inputs.to(dtype), samples.targets.to(dtype)};
}

enum class MastersBegin { kWithFp32Values, kRounded };

// The mean as it travels: added in fp32 in the tree's order, rounded once to `wire`.
inline torch::Tensor mean_by_wire(const std::vector<torch::Tensor>& gradients,
                                  torch::ScalarType wire) {
  std::vector<torch::Tensor> wide;
  for (const torch::Tensor& gradient : gradients) wide.push_back(gradient.to(torch::kFloat));
  return mean_gradient(wide).to(wire).to(torch::kFloat);
}

struct Reference {
  int ranks = 1;
  int steps = 4;
  torch::ScalarType dtype = torch::kBFloat16;
  std::set<std::string> staying = {};  // names of parameters in fp32
  MastersBegin masters = MastersBegin::kWithFp32Values;
  std::optional<torch::ScalarType> wire = {};
  // Called before the first step (-1) and after each with the masters and rank 0's parameters, each once.
  std::function<void(int step, const std::vector<torch::Tensor>& masters,
                     const std::vector<torch::Tensor>& parameters)>
      after_step = {};
};

template <typename Module>
std::vector<torch::Tensor> train_reference_in(const Reference& reference) {
  std::vector<Module> modules;
  std::vector<torch::Tensor> masters;
  for (int rank = 0; rank < reference.ranks; ++rank) {
    Module module = make<Module>();
    const auto distinct = distinct_parameters(module);
    for (const torch::Tensor& parameter : distinct) {
      if (rank > 0) break;
      masters.push_back(parameter.detach().clone());
    }
    for (const auto& named : module->named_parameters()) {
      if (reference.staying.contains(named.key())) continue;
      torch::Tensor parameter = named.value();
      parameter.set_data(parameter.detach().to(reference.dtype));
    }
    modules.push_back(std::move(module));
  }
  if (reference.masters == MastersBegin::kRounded) {
    const auto parameters = distinct_parameters(modules[0]);
    for (size_t i = 0; i < masters.size(); ++i)
      masters[i] = parameters[i].detach().to(torch::kFloat);
  }
  for (torch::Tensor& master : masters) master = master.clone().requires_grad_();
  torch::optim::AdamW optimizer(masters, torch::optim::AdamWOptions(0.01));
  const auto tell = [&](int step) {
    if (reference.after_step) reference.after_step(step, masters, distinct_parameters(modules[0]));
  };
  tell(-1);
  for (int step = 0; step < reference.steps; ++step) {
    for (Module& module : modules) {
      const torch::NoGradGuard no_grad;
      auto from = modules[0]->buffers();
      auto to = module->buffers();
      for (size_t i = 0; i < from.size(); ++i) to[i].copy_(from[i].clone());
    }
    for (int rank = 0; rank < reference.ranks; ++rank) {
      Module& module = modules[static_cast<size_t>(rank)];
      module->zero_grad();
      const Samples samples = samples_in(rank, step, reference.dtype);
      loss_of(module->forward(samples.inputs), samples).backward();
    }
    for (size_t index = 0; index < masters.size(); ++index) {
      std::vector<torch::Tensor> gradients;
      for (Module& module : modules) {
        const auto& gradient = distinct_parameters(module)[index].grad();
        if (gradient.defined()) gradients.push_back(gradient);
      }
      if (gradients.empty()) continue;
      masters[index].mutable_grad() =
          mean_by_wire(gradients, reference.wire.value_or(gradients[0].scalar_type()));
    }
    optimizer.step();
    const torch::NoGradGuard no_grad;
    for (Module& module : modules) {
      const auto parameters = distinct_parameters(module);
      for (size_t index = 0; index < masters.size(); ++index) {
        if (parameters[index].requires_grad()) parameters[index].copy_(masters[index]);
      }
    }
    tell(step);
  }
  std::vector<torch::Tensor> result;
  for (const auto& parameter : modules[0]->parameters()) result.push_back(parameter.detach());
  return result;
}

}  // namespace zeropage::testing
