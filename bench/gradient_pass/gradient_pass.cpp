// Times what stands between the last backward and the optimizer step: unscaling, the look for
// infinities, the norm and clipping. Ours against LibTorch's separate calls, interleaved.
// gradient_pass --help.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <torch/cuda.h>
#include <torch/optim/adamw.h>

#include "bench/interleaved.h"
#include "bench/json_file.h"
#include "bench/measuring_main.h"
#include "bench/spread.h"
#include "optim/cuda/fused_step.h"
#include "optim/fused_step.h"
#include "optim/norm_table.h"
#include "zeropage/check.h"

namespace {

using bench::Contender;
using bench::Spread;
using bench::spread_json;
using zeropage::optim::NormTable;

constexpr int64_t kDefaultNumel = int64_t{1} << 26;
constexpr int64_t kStepNumber = 10;
constexpr double kNormEps = 1e-6;  // as torch's clip_grad_norm_
constexpr double kMostNormError = 1e-5;

struct Flags {
  std::string device = "cpu";
  int64_t numel = kDefaultNumel;
  int rounds = 9;
  std::string json;
};

// Repeated passes must not change the gradient: with the scale 1 and a norm below max_norm they
// multiply by 1.
struct Scaling {
  double loss_scale = 1;
  double max_norm = 1e30;
};

struct Problem {
  torch::optim::AdamWOptions options{1e-3};
  zeropage::optim::Stretch stretch;
  Scaling scaling;
};

Problem make_problem(const at::Device& device, int64_t numel) {
  const auto as = at::TensorOptions(device).dtype(at::kFloat);
  return {.stretch = {.values = at::randn({numel}, as),
                      .gradient = at::randn({numel}, as),
                      .states = {at::full({numel}, 0.1, as), at::full({numel}, 1.0, as)}}};
}

struct OurPass {
  double norm;    // of the unscaled gradient; not finite if an element is not
  double factor;  // on the gradient; 0 where the step is to be left out
};

// A table with all elements as one parameter.
NormTable table_of(const at::Tensor& gradient) {
  return {{{.begin = 0, .numel = gradient.numel()}}, {.sums = 1, .flags = 1}, gradient.device()};
}

OurPass our_pass(const NormTable& table, const at::Tensor& gradient, const Scaling& scaling) {
  const at::Tensor words = table.sizes().make_words(gradient.device());
  table.add_squares(gradient, words);
  const at::Tensor on_host = words.cpu();
  const double squares = table.sizes().sum(on_host.const_data_ptr<int64_t>(), 0).value();
  const double norm = std::sqrt(squares) / scaling.loss_scale;
  if (!std::isfinite(norm)) return {norm, 0};
  return {norm, std::min(1.0, scaling.max_norm / (norm + kNormEps)) / scaling.loss_scale};
}

void our_step(const Problem& problem, double factor) {
  if (factor == 0) return;
  zeropage::optim::fused_step(problem.options, kStepNumber, problem.stretch, {.scale = factor});
}

double our_pass_rewriting(const NormTable& table, const at::Tensor& gradient,
                          const Scaling& scaling) {
  const double factor = our_pass(table, gradient, scaling).factor;
  if (factor == 0) return 0;
  at::Tensor(gradient).mul_(factor);
  return 1;
}

struct LibtorchPass {
  at::Tensor norm;
  at::Tensor found_inf;
  at::Tensor grad_scale;  // undefined: the gradient has been rewritten
};

LibtorchPass libtorch_pass(const at::Tensor& gradient, const Scaling& scaling) {
  LibtorchPass made;
  made.found_inf = at::zeros({1}, gradient.options());
  at::_amp_foreach_non_finite_check_and_unscale_(
      {gradient}, made.found_inf, at::full({1}, 1 / scaling.loss_scale, gradient.options()));
  made.norm = at::linalg_vector_norm(gradient, 2);
  const at::Tensor coefficient = (scaling.max_norm / (made.norm + kNormEps)).clamp_max(1.0);
  at::Tensor(gradient).mul_(coefficient);
  return made;
}

// LibTorch's pass where its fused step takes over what it can: the step divides the gradient by grad_scale, and
// writes it back.
LibtorchPass libtorch_folded_pass(const at::Tensor& gradient, const Scaling& scaling) {
  LibtorchPass made;
  made.norm = at::linalg_vector_norm(gradient, 2) / scaling.loss_scale;
  made.found_inf = made.norm.isfinite().logical_not().to(at::kFloat).view({1});
  const at::Tensor coefficient = (scaling.max_norm / (made.norm + kNormEps)).clamp_max(1.0);
  made.grad_scale = (scaling.loss_scale / coefficient).view({1});
  return made;
}

void libtorch_step(const Problem& problem, const LibtorchPass& pass, const at::Tensor& step) {
  const zeropage::optim::Stretch& s = problem.stretch;
  const auto [beta1, beta2] = problem.options.betas();
  std::optional<at::Tensor> grad_scale;
  if (pass.grad_scale.defined()) grad_scale = pass.grad_scale;
  at::_fused_adamw_({s.values}, {s.gradient}, {s.states[0]}, {s.states[1]}, {}, {step},
                    problem.options.lr(), beta1, beta2, problem.options.weight_decay(),
                    problem.options.eps(), /*amsgrad=*/false, /*maximize=*/false, grad_scale,
                    pass.found_inf);
}

void check_norm(const char* whose, double norm, double expected) {
  ZP_CHECK(std::abs(norm - expected) <= kMostNormError * expected, "the norm by ", whose,
           ": expected ", expected, " as by ours, to 1e-5, got ", norm,
           "; what is compared does not compute the same");
}

// With a scale and a norm that is clipped: the norms, and the gradients that both leave. On the CPU
// LibTorch sums squares in fp32, which is that exact of few elements only.
void check_that_all_agree(const at::Tensor& whole) {
  constexpr int64_t kCheckedNumel = 1 << 16;
  const at::Tensor gradient = whole.narrow(0, 0, std::min(kCheckedNumel, whole.numel())).clone();
  const Scaling scaling{.loss_scale = 1024, .max_norm = 0.01};
  const NormTable table = table_of(gradient);
  const OurPass ours = our_pass(table, gradient, scaling);
  check_norm("LibTorch, folded", libtorch_folded_pass(gradient, scaling).norm.item<double>(),
             ours.norm);
  const at::Tensor theirs = gradient.clone();
  check_norm("LibTorch", libtorch_pass(theirs, scaling).norm.item<double>(), ours.norm);
  const at::Tensor rewritten = gradient.clone();
  our_pass_rewriting(table, rewritten, scaling);
  ZP_CHECK(at::allclose(rewritten, theirs, kMostNormError, 0),
           "the clipped gradients: expected LibTorch's to be ours, to 1e-5");
}

// The norm of all elements: ours must be LibTorch's in fp64; how far LibTorch's in fp32 is off is printed.
void check_whole_norm(const at::Tensor& gradient) {
  const double ours = our_pass(table_of(gradient), gradient, {}).norm;
  const auto norm_in = [&](at::ScalarType dtype) {
    return at::linalg_vector_norm(gradient, 2, {}, false, dtype).item<double>();
  };
  check_norm("LibTorch in fp64", norm_in(at::kDouble), ours);
  std::printf("norm: %.6f; by LibTorch in fp32: %.6f\n", ours, norm_in(at::kFloat));
}

// In the order of kNames; each first alone, then with the optimizer step.
constexpr std::array kNames = {"ours", "ours, gradient rewritten", "LibTorch", "LibTorch, folded"};

std::vector<Contender> contenders(const Problem& problem) {
  const at::Tensor step =
      at::full({}, static_cast<double>(kStepNumber), problem.stretch.values.options());
  const at::Tensor& gradient = problem.stretch.gradient;
  const Scaling& scaling = problem.scaling;
  const NormTable table = table_of(gradient);
  return {{"ours", [=] { our_pass(table, gradient, scaling); }},
          {"ours, with the step",
           [=] { our_step(problem, our_pass(table, gradient, scaling).factor); }},
          {"ours, rewritten", [=] { our_pass_rewriting(table, gradient, scaling); }},
          {"ours, rewritten, with the step",
           [=] { our_step(problem, our_pass_rewriting(table, gradient, scaling)); }},
          {"LibTorch", [=] { libtorch_pass(gradient, scaling); }},
          {"LibTorch, with the step",
           [=] { libtorch_step(problem, libtorch_pass(gradient, scaling), step); }},
          {"LibTorch, folded", [=] { libtorch_folded_pass(gradient, scaling); }},
          {"LibTorch, folded, with the step",
           [=] { libtorch_step(problem, libtorch_folded_pass(gradient, scaling), step); }}};
}

nlohmann::json report(const std::vector<Spread>& seconds) {
  nlohmann::json json;
  std::printf("%-26s %24s %30s\n", "ms", "gradient pass", "and AdamW");
  for (size_t i = 0; i < kNames.size(); ++i) {
    std::printf("%-26s", kNames[i]);
    for (const size_t timed : {2 * i, 2 * i + 1}) {
      const Spread& spread = seconds[timed];
      std::printf(" %10.2f [%7.2f, %8.2f]", spread.median() * 1e3, spread.least() * 1e3,
                  spread.most() * 1e3);
    }
    std::printf("\n");
    json["seconds"][kNames[i]] = {{"pass", spread_json(seconds[2 * i])},
                                  {"pass_and_step", spread_json(seconds[2 * i + 1])}};
  }
  const auto print_ratio = [&](size_t theirs, size_t ours, const char* goal) {
    const Spread pass = quotient(seconds[2 * theirs], seconds[2 * ours]);
    const Spread whole = quotient(seconds[2 * theirs + 1], seconds[2 * ours + 1]);
    const std::string name = std::string(kNames[theirs]) + " / " + kNames[ours];
    std::printf("%s: %.2f [%.2f, %.2f]%s; and AdamW: %.2f [%.2f, %.2f]\n", name.c_str(),
                pass.median(), pass.least(), pass.most(), goal, whole.median(), whole.least(),
                whole.most());
    json["ratios"][name] = {{"pass", spread_json(pass)}, {"pass_and_step", spread_json(whole)}};
  };
  print_ratio(2, 0, " (goal 2.0)");
  print_ratio(2, 1, "");
  print_ratio(3, 0, "");
  return json;
}

void run(const Flags& flags) {
  const bool on_cuda = flags.device == "cuda";
  ZP_CHECK(!on_cuda || zeropage::optim::cuda::is_built(),
           "--device cuda: built without CUDA; cmake --preset cuda");
  ZP_CHECK(!on_cuda || torch::cuda::is_available(), "--device cuda: LibTorch finds no CUDA device");
  const at::Device device = on_cuda ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
  const at::NoGradGuard no_grad;
  const Problem problem = make_problem(device, flags.numel);
  check_that_all_agree(problem.stretch.gradient);
  std::printf("%s, %lld elements of fp32, %d rounds, %d intra-op threads; median [least, most]\n",
              device.str().c_str(), static_cast<long long>(flags.numel), flags.rounds,
              at::get_num_threads());
  check_whole_norm(problem.stretch.gradient);
  const auto all = contenders(problem);
  nlohmann::json json = report(time_interleaved(all, device, flags.rounds));
  json["device"] = device.str();
  json["numel"] = flags.numel;
  json["threads"] = at::get_num_threads();
  bench::write_json(flags.json, json);
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app(
      "Times unscaling, the look for infinities, the norm and clipping of a flat gradient, ours "
      "against LibTorch's, interleaved.");
  app.add_option("--device", flags.device, "where")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  app.add_option("--numel", flags.numel, "elements")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->capture_default_str();
  app.add_option("--rounds", flags.rounds, "times that every figure is measured")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--json", flags.json, "file for every figure of every round; default none");
  return bench::parse_and_measure("gradient_pass", app, argc, argv, [&] { run(flags); });
}
