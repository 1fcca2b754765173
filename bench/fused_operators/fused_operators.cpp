// Times the fused operators, forward and backward, beside the compositions of LibTorch's operators that they stand for, interleaved, and
// shows the peak memory of both. fused_operators --help.
#include <cstdio>
#include <fstream>

#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <torch/cuda.h>
#include <torch/torch.h>

#include "bench/interleaved.h"
#include "bench/measuring_main.h"
#include "bench/spread.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"
#include "zeropage/fused.h"
#include "zeropage/ledger.h"

namespace {

namespace fused = zeropage::fused;
namespace F = torch::nn::functional;
using bench::Spread;
using torch::Tensor;
using Leaves = std::vector<Tensor>;

struct Flags {
  std::string device = "cpu";
  std::string dtype = "fp32";
  int64_t tokens = 2048;
  int64_t width = 576;
  int64_t hidden = 1536;
  int64_t classes = 49152;
  int rounds = 7;
  std::string json;
};

struct Case {
  std::string name;
  Leaves leaves;
  // One result, whose gradient is drawn, or a loss.
  std::function<Tensor(const Leaves&)> ours;
  std::function<Tensor(const Leaves&)> plain;
};

Tensor plain_rms(const Tensor& x, const Tensor& weight) {
  const Tensor wide = x.to(torch::kFloat);
  return (wide * (wide.square().mean(-1, true) + 1e-6).rsqrt()).to(x.scalar_type()) * weight;
}

Tensor plain_rotary(const Tensor& x, const Tensor& cosines, const Tensor& sines) {
  const auto halves = x.chunk(2, -1);
  return x * cosines + torch::cat({-halves[1], halves[0]}, -1) * sines;
}

std::vector<Case> cases_of(const Flags& flags, const torch::TensorOptions& as) {
  constexpr int64_t kHead = 64;
  const auto drawn = [&as](at::IntArrayRef sizes) {
    return torch::randn(sizes, as).requires_grad_();
  };
  const int64_t heads = std::max<int64_t>(1, flags.width / kHead);
  const Tensor angles = torch::outer(
      torch::arange(flags.tokens, as.dtype(torch::kFloat)),
      torch::pow(10000.0F, -torch::arange(0, kHead / 2, as.dtype(torch::kFloat)) * 2 / kHead));
  const Tensor cosines = angles.cos(), sines = angles.sin();
  const Tensor whole_cosines = torch::cat({cosines, cosines}, -1).to(as.dtype()),
               whole_sines = torch::cat({sines, sines}, -1).to(as.dtype());
  const Tensor targets = torch::randint(flags.classes, {flags.tokens}, as.dtype(torch::kLong));
  const int64_t width = flags.width;
  return {
      {"rms_norm",
       {drawn({flags.tokens, width}), drawn({width})},
       [](const Leaves& in) { return fused::rms_norm(in[0], in[1]); },
       [](const Leaves& in) { return plain_rms(in[0], in[1]); }},
      {"add_rms_norm",
       {drawn({flags.tokens, width}), drawn({flags.tokens, width}), drawn({width})},
       [](const Leaves& in) {
         const fused::Added added = fused::add_rms_norm(in[0], in[1], in[2]);
         return added.normed + added.sum;
       },
       [](const Leaves& in) {
         const Tensor sum = in[0] + in[1];
         return plain_rms(sum, in[2]) + sum;
       }},
      {"add_layer_norm",
       {drawn({flags.tokens, width}), drawn({flags.tokens, width}), drawn({width}), drawn({width})},
       [](const Leaves& in) {
         const fused::Added added = fused::add_layer_norm(in[0], in[1], in[2], in[3]);
         return added.normed + added.sum;
       },
       [width](const Leaves& in) {
         const Tensor sum = in[0] + in[1];
         return torch::layer_norm(sum, {width}, in[2], in[3]) + sum;
       }},
      {"rotary",
       {drawn({1, flags.tokens, heads, kHead})},
       [cosines, sines](const Leaves& in) {
         return fused::rotary(in[0].transpose(1, 2), cosines, sines);
       },
       [whole_cosines, whole_sines](const Leaves& in) {
         return plain_rotary(in[0].transpose(1, 2), whole_cosines, whole_sines);
       }},
      {"swiglu",
       {drawn({flags.tokens, flags.hidden}), drawn({flags.tokens, flags.hidden})},
       [](const Leaves& in) { return fused::swiglu(in[0], in[1]); },
       [](const Leaves& in) { return torch::silu(in[0]) * in[1]; }},
      {"bias_gelu",
       {drawn({flags.tokens, flags.hidden}), drawn({flags.hidden})},
       [](const Leaves& in) { return fused::bias_gelu(in[0], in[1], fused::Gelu::kTanh); },
       [](const Leaves& in) { return torch::gelu(in[0] + in[1], "tanh"); }},
      {"linear_cross_entropy",
       {drawn({flags.tokens, width}), drawn({flags.classes, width})},
       [targets](const Leaves& in) { return fused::linear_cross_entropy(in[0], in[1], targets); },
       [targets](const Leaves& in) {
         // Training scripts compute the loss of low precision in fp32.
         return F::cross_entropy(torch::linear(in[0], in[1]).to(torch::kFloat), targets);
       }},
  };
}

class Step {
 public:
  Step(std::function<Tensor(const Leaves&)> forward, const Leaves& leaves)
      : forward_(std::move(forward)) {
    for (const Tensor& leaf : leaves) leaves_.push_back(leaf.detach().requires_grad_());
    const torch::NoGradGuard no_grad;
    const Tensor result = forward_(leaves_);
    gradient_ = result.dim() == 0 ? torch::ones_like(result) : torch::randn_like(result);
  }
  void run() {
    for (Tensor& leaf : leaves_) leaf.mutable_grad() = Tensor();
    forward_(leaves_).backward(gradient_);
  }
  // Beyond what is there before. Unit: bytes.
  int64_t peak() {
    for (Tensor& leaf : leaves_) leaf.mutable_grad() = Tensor();
    const auto ledger = zeropage::memory::Ledger::current();
    const auto type = leaves_[0].device().type();
    ledger->reset_peak();
    const int64_t before = ledger->at_peak(type).total();
    run();
    return ledger->at_peak(type).total() - before;
  }

 private:
  std::function<Tensor(const Leaves&)> forward_;
  Leaves leaves_;
  Tensor gradient_;
};

nlohmann::json measure_case(const Case& of, const torch::Device& device, int rounds) {
  Step ours(of.ours, of.leaves), plain(of.plain, of.leaves);
  const int64_t our_peak = ours.peak(), plain_peak = plain.peak();
  const std::vector<Spread> seconds =
      bench::time_interleaved({{.name = "ours", .run = [&] { ours.run(); }},
                               {.name = "plain", .run = [&] { plain.run(); }}},
                              device, rounds);
  const Spread ratio = bench::quotient(seconds[0], seconds[1]);
  std::printf("%-22s %10.3f %10.3f   %.2f [%.2f, %.2f]   %10s %10s   %.2f\n", of.name.c_str(),
              seconds[0].median() * 1e3, seconds[1].median() * 1e3, ratio.median(), ratio.least(),
              ratio.most(), zeropage::memory::format_bytes(our_peak).c_str(),
              zeropage::memory::format_bytes(plain_peak).c_str(),
              static_cast<double>(our_peak) / static_cast<double>(plain_peak));
  std::fflush(stdout);
  return {{"operator", of.name},
          {"seconds", bench::spread_json(seconds[0])},
          {"plain_seconds", bench::spread_json(seconds[1])},
          {"ratio", bench::spread_json(ratio)},
          {"peak_bytes", our_peak},
          {"plain_peak_bytes", plain_peak}};
}

void measure(const Flags& flags) {
  const torch::Device device(flags.device);
  ZP_CHECK(!device.is_cuda() || torch::cuda::is_available(),
           "--device: expected a device that is here, got ", flags.device,
           "; leave it out for the host");
  const auto dtype = flags.dtype == "fp32"   ? torch::kFloat
                     : flags.dtype == "bf16" ? torch::kBFloat16
                                             : torch::kHalf;
  const auto as = torch::TensorOptions(device).dtype(dtype);
  torch::manual_seed(1);
  std::printf(
      "%lld tokens of %lld, hidden %lld, %lld classes, %s on %s, %d threads, %d rounds; forward "
      "and backward\n",
      static_cast<long long>(flags.tokens), static_cast<long long>(flags.width),
      static_cast<long long>(flags.hidden), static_cast<long long>(flags.classes),
      flags.dtype.c_str(), flags.device.c_str(), at::get_num_threads(), flags.rounds);
  std::printf("%-22s %10s %10s   %-17s   %10s %10s   %s\n", "operator", "ours ms", "plain ms",
              "ratio", "ours peak", "plain peak", "ratio");
  nlohmann::json all = nlohmann::json::array();
  for (const Case& one : cases_of(flags, as))
    all.push_back(measure_case(one, device, flags.rounds));
  if (flags.json.empty()) return;
  std::ofstream out(flags.json);
  out << nlohmann::json{{"tokens", flags.tokens},
                        {"width", flags.width},
                        {"hidden", flags.hidden},
                        {"classes", flags.classes},
                        {"dtype", flags.dtype},
                        {"device", flags.device},
                        {"cases", all}}
             .dump(2)
      << '\n';
  ZP_CHECK(out.good(), "--json: expected a file that can be written, got ", flags.json);
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app(
      "The fused operators of zeropage/fused.h beside LibTorch's compositions: time and peak "
      "memory");
  app.add_option("--device", flags.device, "cpu or cuda")->capture_default_str();
  app.add_option("--dtype", flags.dtype, "fp32, bf16 or fp16")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}))
      ->capture_default_str();
  app.add_option("--tokens", flags.tokens, "tokens of a micro-batch")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--width", flags.width, "features of a token")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--hidden", flags.hidden, "features between the layers of an MLP")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--classes", flags.classes, "tokens of the vocabulary")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--rounds", flags.rounds, "rounds, each with both")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--json", flags.json, "file for all figures");
  return bench::parse_and_measure("fused_operators", app, argc, argv, [&] { measure(flags); });
}
