// train_gpt's model, data, seed and step in plain LibTorch on one rank, not linked with Zeropage or its allocator.
#include <fstream>
#include <iostream>
#include <optional>
#include <vector>

#include <ATen/DeviceAccelerator.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "bench/train_gpt/step_timing.h"
#include "bench/train_gpt/text_data.h"
#include "examples/byte_gpt/gpt.h"
#include "examples/weights_hash/weights_hash.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"

namespace {

using torch::Tensor;

struct Flags {
  std::string data = "auto";
  train_gpt::GptConfig model;
  int64_t batch = 8, steps = 200;
  uint64_t seed = 0;
  double lr = 1e-3;
  std::string optimizer = "adamw";
  int ranks = 1, threads = 1;
  std::string device = "cpu", compute_dtype = "fp32";
  std::string json_path;
};

// AdamW as a careful user writes it: LibTorch's class on the host, its fused operator on CUDA, over fp32 masters
// where the parameters are bf16.
class AdamW {
 public:
  AdamW(std::vector<Tensor> parameters, std::vector<Tensor> masters, double lr)
      : parameters_(std::move(parameters)), masters_(std::move(masters)), lr_(lr) {
    if (!fused()) {
      on_host_.emplace(masters_, torch::optim::AdamWOptions(lr));
      return;
    }
    for (const Tensor& master : masters_) {
      means_.push_back(torch::zeros_like(master));
      squares_.push_back(torch::zeros_like(master));
      steps_.push_back(torch::zeros({}, master.options()));
    }
  }

  void zero_grad() {
    for (Tensor& parameter : parameters_) parameter.mutable_grad().reset();
  }

  void step() {
    const torch::NoGradGuard no_grad;
    std::vector<Tensor> gradients;
    for (const Tensor& parameter : parameters_) gradients.push_back(parameter.grad());
    if (low()) gradients = in_fp32(gradients);
    if (fused()) {
      const torch::optim::AdamWOptions defaults;
      at::_foreach_add_(steps_, 1);
      at::_fused_adamw_(masters_, gradients, means_, squares_, /*max_exp_avg_sqs=*/{}, steps_, lr_,
                        std::get<0>(defaults.betas()), std::get<1>(defaults.betas()),
                        defaults.weight_decay(), defaults.eps(), /*amsgrad=*/false,
                        /*maximize=*/false);
    } else {
      for (size_t i = 0; i < masters_.size(); ++i) masters_[i].mutable_grad() = gradients[i];
      on_host_->step();
      if (low()) on_host_->zero_grad();
    }
    if (low()) at::_foreach_copy_(parameters_, masters_);
  }

 private:
  bool low() const { return parameters_.front().scalar_type() != torch::kFloat32; }
  bool fused() const { return parameters_.front().is_cuda(); }

  // One kernel for many tensors; the operator takes gradients of the masters' dtype only.
  std::vector<Tensor> in_fp32(const std::vector<Tensor>& gradients) const {
    std::vector<Tensor> whole;
    for (const Tensor& master : masters_) whole.push_back(torch::empty_like(master));
    at::_foreach_copy_(whole, gradients);
    return whole;
  }

  std::vector<Tensor> parameters_, masters_;  // the same tensors where those are fp32
  double lr_;
  std::vector<Tensor> means_, squares_, steps_;  // on CUDA
  std::optional<torch::optim::AdamW> on_host_;
};

struct Figures {
  std::vector<double> loss, step_seconds;
};

Figures run_steps(const Flags& flags, const train_gpt::TextData& data, torch::Device device,
                  train_gpt::Gpt& gpt, AdamW& optimizer) {
  Figures figures;
  const auto finish = [&](const train_gpt::StepInFlight& step) {
    figures.step_seconds.push_back(step.seconds());
    figures.loss.push_back(step.loss());
  };
  std::optional<train_gpt::StepInFlight> before;
  for (int64_t step = 0; step < flags.steps; ++step) {
    const auto on_host =
        data.training_batch(flags.seed, static_cast<uint64_t>(step * flags.batch), flags.batch);
    train_gpt::StepStart start(device);
    const auto batch = to_device(on_host, device);
    optimizer.zero_grad();
    const auto loss = train_gpt::next_token_loss(gpt(batch.inputs), batch.targets);
    loss.backward();
    optimizer.step();
    train_gpt::StepInFlight enqueued(std::move(start), loss);
    if (device.is_cpu()) {
      finish(enqueued);
      continue;
    }
    if (before) finish(*before);
    before = std::move(enqueued);
  }
  if (before) finish(*before);
  return figures;
}

void train(const Flags& flags) {
  torch::set_num_threads(flags.threads);
  ZP_CHECK(flags.device == "cpu" || torch::cuda::is_available(),
           "--device cuda: there is no CUDA device, or this build is without CUDA");
  const train_gpt::TextData data(flags.data, flags.model.sequence);
  const torch::Device device =
      flags.device == "cuda" ? torch::Device(torch::kCUDA, 0) : torch::kCPU;
  zeropage::memory::reset_peak_resident_bytes();
  const int64_t base_bytes = zeropage::memory::resident_bytes();

  train_gpt::Gpt gpt(flags.model, flags.seed);
  gpt->to(device);
  std::vector<Tensor> masters = gpt->parameters();
  if (flags.compute_dtype == "bf16") {
    for (Tensor& master : masters) master = master.detach().clone().requires_grad_();
    gpt->to(torch::kBFloat16);
  }
  AdamW optimizer(gpt->parameters(), std::move(masters), flags.lr);
  const Figures figures = run_steps(flags, data, device, gpt, optimizer);

  nlohmann::json memory = {{"rank", 0},
                           {"rss_base_bytes", base_bytes},
                           {"rss_peak_bytes", zeropage::memory::peak_resident_bytes()}};
  if (device.is_cuda()) {
    // The peak of the requested sizes, as a ledger counts; the allocator rounds them up.
    memory["peak_bytes"] = at::accelerator::getDeviceStats(0).requested_bytes[0].peak;
  }
  train_gpt::WeightsHash hash;
  for (const Tensor& parameter : gpt->parameters()) hash.add(parameter.detach());
  const auto tokens = static_cast<double>(flags.batch * flags.model.sequence);
  const nlohmann::json json = {
      {"loss", figures.loss},
      {"step_seconds", figures.step_seconds},
      {"tokens_per_second", tokens / train_gpt::median(figures.step_seconds)},
      {"memory", nlohmann::json::array({memory})},
      {"weights_sha256", hash.hex()}};
  std::ofstream out(flags.json_path);
  out << json.dump(1) << '\n';
  out.close();
  ZP_CHECK(out.good(), "--json ", flags.json_path,
           ": cannot be written; is the folder there and writable?");
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app(
      "Trains train_gpt's GPT by a plain LibTorch loop on one rank; flags as train_gpt's.");
  const CLI::Range positive(int64_t{1}, int64_t{1} << 40);
  app.option_defaults()->always_capture_default();
  app.add_option("--data", flags.data);
  app.add_option("--d-model", flags.model.d_model)->check(positive);
  app.add_option("--layers", flags.model.layers)->check(positive);
  app.add_option("--heads", flags.model.heads)->check(positive);
  app.add_option("--sequence", flags.model.sequence)->check(positive);
  app.add_option("--batch", flags.batch)->check(positive);
  app.add_option("--steps", flags.steps)->check(positive);
  app.add_option("--seed", flags.seed);
  app.add_option("--lr", flags.lr);
  app.add_option("--optimizer", flags.optimizer)->check(CLI::IsMember({"adamw"}));
  app.add_option("--ranks", flags.ranks)->check(CLI::Range(1, 1));
  app.add_option("--threads", flags.threads)->check(positive);
  app.add_option("--device", flags.device)->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--compute-dtype", flags.compute_dtype)->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--json", flags.json_path)->required();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  try {
    train(flags);
  } catch (const c10::Error& error) {
    std::cerr << "bare_loop: " << error.what_without_backtrace() << std::endl;
    return 1;
  }
  return 0;
}
