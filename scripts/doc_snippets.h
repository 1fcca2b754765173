// What snippets of README.md and docs/ take for granted: a model, data, and what the snippet before made. They are compiled and not run.
#pragma once

#include <filesystem>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "zeropage/event_sink.h"
#include "zeropage/testing.h"
#include "zeropage/text/token_file.h"
#include "zeropage/text/tokenizer.h"
#include "zeropage/zeropage.h"

using zeropage::operator""_GiB;
using zeropage::operator""_MiB;

struct GptConfig {
  int64_t layers = 12;
};

struct GptImpl : torch::nn::Module {
  explicit GptImpl(const GptConfig&);
  torch::Tensor forward(const torch::Tensor& tokens);
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Gpt);

using Batch = torch::data::Example<>;
torch::Tensor criterion(const torch::Tensor& output, const torch::Tensor& target);
torch::Tensor block(const torch::Tensor& x);
double tokens_in(const Batch& batch);
void train_step(int64_t step);
void evaluate(zeropage::DistributedDataParallel<Gpt>& model);
struct EpochSampler {
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);
};

// The head of a function whose body is a snippet. A snippet may name the parameters; what it declares itself hides them.
#define ZEROPAGE_SNIPPET_WITH(name, ...)                                                     \
  void name(zeropage::World& world, zeropage::Options& options, const GptConfig& config,     \
            std::vector<Batch>* loader, Batch& batch, torch::Tensor& x, torch::Tensor& loss, \
            zeropage::DistributedDataParallel<Gpt>& model,                                   \
            zeropage::Optimizer<torch::optim::AdamW>& optimizer __VA_OPT__(, ) __VA_ARGS__)
#define ZEROPAGE_SNIPPET(name) ZEROPAGE_SNIPPET_WITH(name, int64_t step, int64_t samples)
#define ZEROPAGE_SNIPPET_THAT_COUNTS(name) ZEROPAGE_SNIPPET_WITH(name)
