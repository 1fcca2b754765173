// Accumulation in plain LibTorch, and a loss whose gradients are known: what proofs of
// zeropage/accumulator.h and zeropage/gradient_norm.h share.
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/harness/reference.h"
#include "tests/harness/tiny_models.h"
#include "zeropage/zeropage.h"

namespace zeropage::testing {

template <typename Module>
Module make_seeded() {
  // Modules draw from the one generator of the process, and ranks are threads of it.
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  torch::manual_seed(7);
  return Module();
}

inline std::unique_ptr<torch::optim::Optimizer> plain_adamw(std::vector<torch::Tensor> parameters) {
  return std::make_unique<torch::optim::AdamW>(std::move(parameters),
                                               torch::optim::AdamWOptions(0.01));
}

// How micro-batches become one gradient. Micro-batch `micro * ranks + rank` is what a rank sees.
struct Accumulation {
  int ranks = 1;
  int micro_steps = 1;
  ReduceMicroSteps reduce = ReduceMicroSteps::kEach;

  int index(int micro, int rank) const { return micro * ranks + rank; }
};

// This rank's mean squared error, in fp32 whatever the module computes in.
template <typename Module>
torch::Tensor loss_of_micro_batch(Module& module, int step, int index) {
  const Samples samples = samples_of(index, step);
  return loss_of(module->forward(samples.inputs), samples);
}

// The sum over micro-batches, by distinct parameter: over ranks as a tree and over micro-steps one
// after the other (kEach), or the other way round (kOnce).
template <typename Module>
std::vector<torch::Tensor> summed_gradients(Module& module, int step, const Accumulation& how) {
  const auto parameters = distinct_parameters(module);
  const auto zero_grad = [&] {
    for (auto parameter : parameters) parameter.mutable_grad().reset();
  };
  const bool each = how.reduce == ReduceMicroSteps::kEach;
  std::vector<torch::Tensor> sums(parameters.size());
  // [rounds][parameter][rank]
  const int rounds = each ? how.micro_steps : 1;
  for (int round = 0; round < rounds; ++round) {
    std::vector<std::vector<torch::Tensor>> by_rank(parameters.size());
    for (int rank = 0; rank < how.ranks; ++rank) {
      zero_grad();
      for (int micro = each ? round : 0; micro < (each ? round + 1 : how.micro_steps); ++micro) {
        loss_of_micro_batch(module, step, how.index(micro, rank)).backward();
      }
      for (size_t i = 0; i < parameters.size(); ++i) by_rank[i].push_back(parameters[i].grad());
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      const torch::Tensor sum = sum_of_gradients(by_rank[i]);
      if (!sum.defined()) continue;
      sums[i] = sums[i].defined() ? sums[i] + sum : sum.clone();
    }
  }
  zero_grad();
  return sums;
}

// Trains one copy on all micro-batches; what every rank must equal bit for bit.
template <typename Module>
std::vector<torch::Tensor> train_accumulated_reference(const Accumulation& how, int steps) {
  Module module = make_seeded<Module>();
  const auto parameters = distinct_parameters(module);
  const auto optimizer = plain_adamw(parameters);
  const double factor = 1.0 / (how.micro_steps * how.ranks);
  for (int step = 0; step < steps; ++step) {
    const auto sums = summed_gradients(module, step, how);
    for (size_t i = 0; i < parameters.size(); ++i) {
      torch::Tensor parameter = parameters[i];
      parameter.mutable_grad() =
          sums[i].defined() && factor != 1 ? torch::mul(sums[i], factor) : sums[i];
    }
    optimizer->step();
  }
  std::vector<torch::Tensor> result;
  for (const auto& parameter : module->parameters()) result.push_back(parameter.detach().clone());
  return result;
}

// What a user writes: the micro-batches of one step of this rank, then the step.
template <typename Module>
StepReport accumulated_step(DistributedDataParallel<Module>& model, Accumulator& accumulator,
                            torch::optim::Optimizer& optimizer, int step) {
  const comm::World& world = model.world();
  for (int64_t micro = 0; micro < accumulator.micro_steps(); ++micro) {
    const auto index = static_cast<int>(micro) * world.size() + world.rank();
    const Samples samples = samples_of(index, step);
    accumulator.backward(loss_of(model(samples.inputs).to(torch::kFloat), samples));
  }
  return accumulator.step(optimizer);
}

inline std::vector<torch::Tensor> copies_of(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> copies;
  for (const torch::Tensor& tensor : tensors) {
    copies.push_back(tensor.detach().to(torch::kFloat, false, /*copy=*/true));
  }
  return copies;
}

// Ragged parameters over several blocks and shards, one scalar, one empty, one frozen, one that
// no loss uses.
struct RaggedImpl : torch::nn::Module {
  RaggedImpl() {
    add("wide", {3, 1001});
    add("scalar", {});
    add("empty", {0, 4});
    add("frozen", {300}).requires_grad_(false);
    add("block", {256});
    add("unused", {77});
    add("odd", {257});
    add("many", {5003});
  }
  torch::Tensor add(const std::string& name, at::IntArrayRef sizes) {
    return register_parameter(name, torch::full(sizes, 0.5));
  }
  torch::Tensor forward(const torch::Tensor& x) { return x; }
};
TORCH_MODULE(Ragged);

// Gradients that fp32 holds exactly, and so sums of a few of them: multiples of 1/16.
inline torch::Tensor known_gradient(int index, const torch::Tensor& like, int64_t salt) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(1000 * salt + index + 1));
  return torch::randint(-200, 201, like.sizes(), generator).to(torch::kFloat) / 16;
}

inline bool has_known_gradient(const std::string& name, const torch::Tensor& parameter) {
  return parameter.requires_grad() && name != "unused";
}

// A loss with known_gradient(index, parameter) for every parameter but "unused".
template <typename Named>
torch::Tensor loss_with_known_gradients(const Named& named_parameters, int index) {
  torch::Tensor loss = torch::zeros({});
  int64_t salt = 0;
  for (const auto& item : named_parameters) {
    ++salt;
    if (!has_known_gradient(item.key(), item.value())) continue;
    loss = loss + (item.value() * known_gradient(index, item.value(), salt)).sum();
  }
  return loss;
}

// The root of the sum of squares, in fp64.
inline double norm_of(const std::vector<torch::Tensor>& gradients) {
  double squares = 0;
  for (const torch::Tensor& gradient : gradients) {
    if (gradient.defined()) squares += gradient.to(torch::kFloat64).square().sum().item<double>();
  }
  return std::sqrt(squares);
}

}  // namespace zeropage::testing
