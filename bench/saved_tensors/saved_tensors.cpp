// Times what hooks for saved tensors cost: a training step in the engine that asks for hooks, where
// there are none, against LibTorch's own; and, for each saved tensor, hooks that keep it.
// saved_tensors --help.
#include "zeropage/saved_tensors.h"

#include <cstdio>
#include <limits>

#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <torch/csrc/autograd/engine.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include "bench/interleaved.h"
#include "bench/json_file.h"
#include "bench/measuring_main.h"
#include "bench/spread.h"
#include "zeropage/activation_offload.h"
#include "zeropage/check.h"
#include "zeropage/recompute.h"

namespace {

using bench::Contender;
using bench::Spread;
using bench::spread_json;
using torch::autograd::Engine;
using namespace zeropage::checkpointing;

constexpr int kBlocks = 4;
constexpr int64_t kHugeBytes = std::numeric_limits<int64_t>::max() / 4;
constexpr double kMicroseconds = 1e6;

struct Flags {
  std::vector<int64_t> widths = {64, 256};
  int chain = 512;
  int64_t numel = 64;
  int rounds = 31;
  std::string json;
};

// With hooks for C++: that of the first scope.
Engine& hook_engine() {
  static Engine& engine = []() -> Engine& {
    const SavedTensorScope installs(nullptr);
    return Engine::get_default_engine();
  }();
  return engine;
}

// Pre-norm residual blocks, without attention: [width, width] -> [width, width]
class Blocks : public torch::nn::Module {
 public:
  explicit Blocks(int64_t width) {
    for (int i = 0; i < kBlocks; ++i) {
      const torch::nn::LayerNormOptions norm({width});
      blocks_->push_back(
          torch::nn::Sequential(torch::nn::LayerNorm(norm), torch::nn::Linear(width, 4 * width),
                                torch::nn::GELU(), torch::nn::Linear(4 * width, width)));
    }
    register_module("blocks", blocks_);
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : *blocks_) x = x + block->as<torch::nn::Sequential>()->forward(x);
    return x;
  }

 private:
  torch::nn::ModuleList blocks_;
};

// A step in one engine or the other; returns a gradient, so that it can be checked.
class Training {
 public:
  explicit Training(int64_t width)
      : model_(std::make_shared<Blocks>(width)), input_(at::randn({width, width})) {}
  at::Tensor step(torch::autograd::EngineStub engine) const {
    torch::autograd::set_default_engine_stub(engine);
    model_->zero_grad();
    model_->forward(input_).square().mean().backward();
    return model_->parameters().front().grad();
  }

 private:
  std::shared_ptr<Blocks> model_;
  at::Tensor input_;  // [width, width]
};

// Operators that save one tensor each and take little besides.
class Chain {
 public:
  Chain(int length, int64_t numel) : length_(length), input_(at::randn({numel})) {}
  // Scope(argument) is around the forward.
  template <typename Scope, typename Argument>
  at::Tensor step(Argument&& argument) const {
    const at::Tensor x = begin();
    at::Tensor loss;
    {
      const Scope scope(std::forward<Argument>(argument));
      loss = forward(x);
    }
    loss.backward();
    return x.grad();
  }
  at::Tensor step() const {
    const at::Tensor x = begin();
    forward(x).backward();
    return x.grad();
  }

 private:
  at::Tensor begin() const {
    torch::autograd::set_default_engine_stub(hook_engine);
    return input_.detach().requires_grad_();
  }
  at::Tensor forward(at::Tensor x) const {
    for (int i = 0; i < length_; ++i) x = x.sin();
    return x.sum();
  }

  int length_;
  at::Tensor input_;  // [numel]
};

class KeepingHooks final : public SavedTensorHooks {
 public:
  std::unique_ptr<PackedTensor> pack(const at::Tensor& tensor) override {
    ++packed_;
    return keep(tensor);
  }
  int64_t packed() const { return packed_; }

 private:
  int64_t packed_ = 0;
};

// Runs for its gradient; `run` of a Contender drops it.
struct Checked {
  std::string name;
  std::function<at::Tensor()> step;
};

void check_same_bits(const std::vector<Checked>& all) {
  const at::Tensor expected = all.front().step().clone();
  for (const Checked& one : all) {
    ZP_CHECK(at::equal(one.step(), expected), one.name, ": expected the gradient of ",
             all.front().name, ", bit by bit; what is compared does not compute the same");
  }
}

std::vector<Checked> engines(int64_t width) {
  const auto training = std::make_shared<Training>(width);
  return {{"LibTorch's engine", [=] { return training->step(Engine::get_base_engine); }},
          {"ours without hooks", [=] { return training->step(hook_engine); }}};
}

std::vector<Checked> hooks(const std::shared_ptr<const Chain>& chain) {
  const auto keeping = std::make_shared<KeepingHooks>();
  const auto all_stays =
      std::make_shared<Recompute>(RecomputeOptions{.budget_bytes = kHugeBytes, .least_bytes = 1});
  const auto selective = std::make_shared<Recompute>(RecomputeOptions::selective());
  const auto offload =
      std::make_shared<ActivationOffload>(ActivationOffloadOptions{.least_bytes = kHugeBytes});
  return {{"no hooks", [=] { return chain->step(); }},
          {"hooks that keep", [=] { return chain->step<SavedTensorScope>(keeping); }},
          {"Recompute that keeps", [=] { return chain->step<ActivationScope>(*all_stays); }},
          {"Recompute, too small", [=] { return chain->step<ActivationScope>(*selective); }},
          {"offload, too small", [=] { return chain->step<ActivationScope>(*offload); }}};
}

int64_t saved_tensors_of(const Chain& chain) {
  const auto counting = std::make_shared<KeepingHooks>();
  chain.step<SavedTensorScope>(counting);
  return counting->packed();
}

nlohmann::json report_engines(const Spread* seconds, int64_t width) {
  const Spread ratio = quotient(seconds[1], seconds[0]);
  // On a busy machine the firmer figure.
  const double of_least = seconds[1].least() / seconds[0].least();
  std::printf(
      "width %5lld: %9.3f ms, LibTorch's engine %9.3f ms; ours / LibTorch's: "
      "%.4f [%.4f, %.4f] (goal 1.01); of the least times: %.4f\n",
      static_cast<long long>(width), seconds[1].median() * 1e3, seconds[0].median() * 1e3,
      ratio.median(), ratio.least(), ratio.most(), of_least);
  return {{"width", width},
          {"libtorch_seconds", spread_json(seconds[0])},
          {"our_seconds", spread_json(seconds[1])},
          {"ratio", spread_json(ratio)},
          {"ratio_of_least", of_least}};
}

// Microseconds a saved tensor beyond those of `plain`.
nlohmann::json report_hooks(const std::string& name, const Spread& seconds, const Spread& plain,
                            int64_t saved) {
  Spread extra;
  for (size_t round = 0; round < seconds.rounds.size(); ++round) {
    extra.rounds.push_back((seconds.rounds[round] - plain.rounds[round]) * kMicroseconds /
                           static_cast<double>(saved));
  }
  std::printf("%s: %.3f [%.3f, %.3f] us a saved tensor (goal 2.0)\n", name.c_str(), extra.median(),
              extra.least(), extra.most());
  return spread_json(extra);
}

void run(const Flags& flags) {
  hook_engine();
  std::vector<Checked> all;
  const auto add = [&all](const std::vector<Checked>& group) {
    check_same_bits(group);
    all.insert(all.end(), group.begin(), group.end());
  };
  for (const int64_t width : flags.widths) add(engines(width));
  const auto chain = std::make_shared<const Chain>(flags.chain, flags.numel);
  const auto of_chain = hooks(chain);
  // From the third step on a Recompute follows its plan.
  check_same_bits(of_chain);
  add(of_chain);
  const int64_t saved = saved_tensors_of(*chain);
  std::vector<Contender> contenders;
  for (const Checked& one : all) contenders.push_back({one.name, [&one] { one.step(); }});
  std::printf("%d rounds, %d intra-op threads; median [least, most]\n", flags.rounds,
              at::get_num_threads());
  const auto seconds = time_interleaved(contenders, at::kCPU, flags.rounds);

  nlohmann::json json = {{"threads", at::get_num_threads()}, {"saved_tensors", saved}};
  size_t next = 0;
  for (const int64_t width : flags.widths) {
    json["engines"].push_back(report_engines(&seconds[next], width));
    next += 2;
  }
  const Spread& plain = seconds[next];
  std::printf(
      "%d operators, %lld saved tensors of %lld elements; forward and backward without "
      "hooks: %.3f us a saved tensor\n",
      flags.chain, static_cast<long long>(saved), static_cast<long long>(flags.numel),
      plain.median() * kMicroseconds / static_cast<double>(saved));
  json["plain_seconds"] = spread_json(plain);
  while (++next < all.size()) {
    json["microseconds"][all[next].name] =
        report_hooks(all[next].name, seconds[next], plain, saved);
  }
  bench::write_json(flags.json, json);
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app("Times what hooks for saved tensors cost, interleaved.");
  app.add_option("--widths", flags.widths, "Widths of the blocks that are trained, and their rows")
      ->delimiter(',')
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->capture_default_str();
  app.add_option("--chain", flags.chain, "Operators of the chain, each of which saves a tensor")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  app.add_option("--numel", flags.numel, "Elements of a tensor in the chain")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->capture_default_str();
  app.add_option("--rounds", flags.rounds, "Times that every figure is measured")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--json", flags.json, "File for every figure of every round; default none");
  return bench::parse_and_measure("saved_tensors", app, argc, argv, [&] { run(flags); });
}
