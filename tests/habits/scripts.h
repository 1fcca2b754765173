// What scripts of habits share: their data, and a plain step.
#pragma once

#include "tests/habits/habit.h"
#include "tests/harness/errors.h"
#include "tests/harness/tiny_models.h"

namespace zeropage::testing {

using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    first = register_module("first", torch::nn::Linear(7, 40));
    second = register_module("second", torch::nn::Linear(40, 40));
    last = register_module("last", torch::nn::Linear(40, 7));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return last(torch::tanh(second(torch::tanh(first(x)))));
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, last{nullptr};
};
TORCH_MODULE(Mlp);

inline torch::Tensor loss_against(const torch::Tensor& outputs, const torch::Tensor& targets) {
  return torch::mse_loss(outputs.to(torch::kFloat), targets);
}

template <typename Run, typename Model>
torch::Tensor loss_of_step(Run& run, Model& model, int step, int64_t batch = 3) {
  const Samples samples = samples_of(run.rank(), step, batch);
  return run.forward([&] { return loss_against(model(samples.inputs), samples.targets); });
}

template <typename Run, typename Model>
void backward_of_step(Run& run, Model& model, int step) {
  run.backward(loss_of_step(run, model, step));
}

template <typename Run, typename Model>
void train_step(Run& run, Model& model, torch::optim::Optimizer& optimizer, int step) {
  optimizer.zero_grad();
  backward_of_step(run, model, step);
  optimizer.step();
}

template <typename Run, typename Model>
void train_steps(Run& run, Model& model, torch::optim::Optimizer& optimizer, int steps = 3,
                 int first = 0) {
  for (int step = first; step < first + steps; ++step) train_step(run, model, optimizer, step);
}

// All parameters, and the buffers.
template <typename Run, typename Model>
Values everything(Run& run, Model& model) {
  Values all = run.values(model);
  for (const auto& buffer : model.buffers()) all.push_back(buffer.detach().clone());
  return all;
}

// A script of so many steps, each zero_grad(), backward(model, step), which may do more, and step().
template <typename A, typename M, typename Run, typename Options, typename Backward>
Values trained_by(Run& run, const Options& options, int steps, const Backward& backward) {
  auto model = run.wrap(make<M>());
  auto optimizer = run.template optimizer<A>(model, options);
  for (int step = 0; step < steps; ++step) {
    optimizer->zero_grad();
    backward(model, step);
    optimizer->step();
  }
  return everything(run, model);
}

}  // namespace zeropage::testing
