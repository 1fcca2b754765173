// A model with layers of experts, and what plain LibTorch makes of it in one process.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include <torch/torch.h>

#include "tests/harness/ranks.h"
#include "zeropage/zeropage.h"

namespace zeropage::experts_test {

using namespace zeropage::testing;
using parallel::Experts;
using parallel::ExpertsOptions;
using torch::Tensor;
using torch::optim::SGD;
using torch::optim::SGDOptions;

inline constexpr int64_t kWidth = 8;

// capacity_factor: 0: none.
inline ExpertsOptions options_of(parallel::Scoring scoring, double capacity_factor) {
  ExpertsOptions options(kWidth, 12, 12, 2);
  if (capacity_factor > 0) options.capacity_factor = capacity_factor;
  options.scoring = scoring;
  options.balance_loss = 0.05;
  options.balance_bias_rate = 0.001;
  return options;
}

struct NetImpl : torch::nn::Module {
  explicit NetImpl(double capacity_factor = 0) {
    first =
        register_module("first", Experts(options_of(parallel::Scoring::kSoftmax, capacity_factor)));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    second = register_module("second",
                             Experts(options_of(parallel::Scoring::kSigmoid, capacity_factor)));
    head = register_module("head", torch::nn::Linear(kWidth, kWidth));
  }
  Tensor forward(Tensor x) {
    x = x + first(x);
    x = x + second(norm(x));
    return head(x);
  }
  Tensor auxiliary_loss() { return first->auxiliary_loss() + second->auxiliary_loss(); }
  void update_balance(const World& world) {
    first->update_balance(world);
    second->update_balance(world);
  }
  Experts first{nullptr}, second{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Net);

inline Net make_net(torch::Dtype dtype = torch::kDouble, double capacity_factor = 0) {
  static std::mutex generator;
  const std::lock_guard lock(generator);
  torch::manual_seed(5);
  Net net(capacity_factor);
  net->to(dtype);
  return net;
}

// Other numbers of tokens on each rank, and none on the second one in most steps.
inline int64_t tokens_of(int rank, int step) {
  return rank == 1 && step % 3 != 2 ? 0 : 3 + 5 * rank + step % 4;
}

inline Tensor batch_of(int rank, int step, int64_t tokens) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(100 * step + rank));
  return torch::randn({1, tokens, kWidth}, generator, torch::kDouble);
}

// A sum, which is defined without tokens.
inline Tensor loss_of(const Tensor& outputs) {
  return outputs.square().sum() / 20;
}

struct Script {
  int steps = 4;
  int micro_steps = 1;
  double capacity_factor = 0;  // 0: no token is dropped
  int64_t least_bytes = 1;     // that a Recompute drops
  std::function<int64_t(int rank, int step)> tokens = &tokens_of;
};

// Ranks with few tokens, none, and many, of which a Recompute keeps what is below 1 KiB: 16 tokens of kWidth.
inline Script uneven_script(double capacity_factor) {
  Script script;
  script.capacity_factor = capacity_factor;
  script.least_bytes = 1024;
  script.tokens = [](int rank, int step) -> int64_t {
    return std::vector{3, 40, 0, 9}[(rank + step) % 4];
  };
  return script;
}

// By plain LibTorch in one process: the mean of the ranks' losses.
inline std::vector<Tensor> plainly_trained(int ranks, const Script& script) {
  Net net = make_net(torch::kDouble, script.capacity_factor);
  SGD optimizer(net->parameters(), SGDOptions(0.05).momentum(0.9));
  run_ranks(1, [&](World& alone) {
    for (int step = 0; step < script.steps; ++step) {
      optimizer.zero_grad();
      for (int micro = 0; micro < script.micro_steps; ++micro) {
        const int at = step * script.micro_steps + micro;
        for (int rank = 0; rank < ranks; ++rank) {
          const Tensor loss = loss_of(net(batch_of(rank, at, script.tokens(rank, at))));
          ((loss + net->auxiliary_loss()) / (ranks * script.micro_steps)).backward();
        }
      }
      optimizer.step();
      net->update_balance(alone);
    }
  });
  std::vector<Tensor> values = net->parameters();
  for (const Tensor& buffer : net->buffers()) values.push_back(buffer);
  return values;
}

enum class How { kPlainly, kInARegion, kRecomputed, kRecomputedByBlocks };
inline constexpr const char* kWays[] = {"Plainly", "InARegion", "Recomputed", "RecomputedByBlocks"};

// Outputs of one forward, in that way.
template <typename Model>
Tensor outputs_of(Model& model, const Tensor& x, How how, checkpointing::Recompute& recompute) {
  if (how == How::kInARegion) return checkpoint([&](const Tensor& x) { return model(x); }, x);
  std::optional<ActivationScope> scope;
  if (how != How::kPlainly) scope.emplace(recompute);
  return model(x);
}

// least_bytes: smaller tensors stay.
template <typename Model>
checkpointing::Recompute recompute_of(const Model& model, How how, int64_t least_bytes = 1) {
  RecomputeOptions options = RecomputeOptions::selective();
  if (how == How::kRecomputedByBlocks) {
    const NetImpl& net = *model.module();
    std::vector<Tensor> second = net.norm->parameters();
    for (const Tensor& parameter : net.second->parameters()) second.push_back(parameter);
    options = RecomputeOptions::by_blocks(
        {.lists = {}, .parameters = {net.first->parameters(), second, net.head->parameters()}});
  }
  options.least_bytes = least_bytes;
  return zeropage::recompute(model, options);
}

}  // namespace zeropage::experts_test
