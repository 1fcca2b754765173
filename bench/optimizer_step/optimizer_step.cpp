// Times the fused AdamW against at::_fused_adamw_ and against copying, interleaved.
// optimizer_step --help.
#include <array>
#include <cstdio>
#include <iostream>

#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>
#include <torch/torch.h>

#include "bench/optimizer_step/interleaved.h"
#include "bench/optimizer_step/same_mix.h"
#include "memory/check.h"
#include "offload/cuda/fused_step.h"
#include "offload/flat_tensor.h"
#include "offload/fused_step.h"

namespace {

using collectives::Spread;
using optimizer_step::Contender;
using optimizer_step::SameMix;

constexpr int64_t kDefaultNumelOfCpu = int64_t{1} << 26;
constexpr int64_t kDefaultNumelOfCuda = int64_t{1} << 30;
constexpr int64_t kStepBytes = 7 * 4;  // an element: 4 buffers read, 3 written
constexpr int64_t kCopyBytes = 2 * 4;
struct Flags {
  std::string device = "cpu";
  int64_t numel = 0;
  int rounds = 9;
};

void touch_on_cpu(const SameMix& mix) {
  constexpr int64_t kNumelPerThread = 32768;
  at::parallel_for(0, mix.numel, kNumelPerThread, [&](int64_t begin, int64_t end) {
    const SameMix own = mix;
    for (int64_t i = begin; i < end; ++i) {
      own.values[i] = own.values[i] * own.one + own.gradient[i] * own.zero;
      own.states[0][i] *= own.one;
      own.states[1][i] *= own.one;
    }
  });
}

// What a step of theirs reads and writes an element, in the order of contenders().
constexpr std::array<int64_t, 4> kBytesPerElement = {kStepBytes, kStepBytes, kStepBytes,
                                                     kCopyBytes};

// All over the same tensors. Their order is that of report().
std::vector<Contender> contenders(const at::Device& device, int64_t numel) {
  constexpr int64_t kStepNumber = 10;
  const auto options = torch::optim::AdamWOptions(1e-3);
  const auto as = at::TensorOptions(device).dtype(at::kFloat);
  const zeropage::offload::Stretch s{
      .values = at::randn({numel}, as),
      .gradient = at::randn({numel}, as),
      .states = {at::full({numel}, 0.1, as), at::full({numel}, 1.0, as)}};
  const auto ours = [=] { zeropage::offload::fused_step(options, kStepNumber, s); };
  const auto libtorchs = [=, step = at::full({}, kStepNumber, as)] {
    const auto [beta1, beta2] = options.betas();
    at::_fused_adamw_({s.values}, {s.gradient}, {s.states[0]}, {s.states[1]}, {}, {step},
                      options.lr(), beta1, beta2, options.weight_decay(), options.eps(),
                      /*amsgrad=*/false, /*maximize=*/false);
  };
  const auto same_mix = [=] {
    const SameMix mix{s.values.data_ptr<float>(),
                      s.gradient.data_ptr<float>(),
                      {s.states[0].data_ptr<float>(), s.states[1].data_ptr<float>()},
                      numel};
    if (device.is_cpu()) return touch_on_cpu(mix);
    touch_on_cuda(mix, zeropage::offload::current_stream(device));
  };
  const auto copy = [=] { at::Tensor(s.values).copy_(s.gradient); };
  return {{"fused AdamW", ours},
          {"at::_fused_adamw_", libtorchs},
          {"same mix of bytes", same_mix},
          {"plain copy", copy}};
}

void print_ratio(const char* what, const Spread& ratio, const char* goal) {
  std::printf("%s: %.2f [%.2f, %.2f]%s\n", what, ratio.median(), ratio.least(), ratio.most(), goal);
}

void report(const std::vector<Contender>& all, const std::vector<Spread>& seconds, int64_t numel) {
  for (size_t i = 0; i < all.size(); ++i) {
    const double gigabytes = static_cast<double>(kBytesPerElement[i] * numel) * 1e-9;
    std::printf("%-18s %9.3f ms  %7.1f GB/s [%.1f, %.1f]\n", all[i].name.c_str(),
                seconds[i].median() * 1e3, gigabytes / seconds[i].median(),
                gigabytes / seconds[i].most(), gigabytes / seconds[i].least());
  }
  Spread plain = quotient(seconds[3], seconds[0]);
  for (double& round : plain.rounds) round *= static_cast<double>(kStepBytes) / kCopyBytes;
  print_ratio("fused AdamW / copy bandwidth", quotient(seconds[2], seconds[0]), " (goal 0.90)");
  print_ratio("fused AdamW / plain copy's bandwidth", plain, "");
  print_ratio("fused AdamW / at::_fused_adamw_", quotient(seconds[1], seconds[0]), " (goal 1.0)");
}

void run(const Flags& flags) {
  const bool on_cuda = flags.device == "cuda";
  ZP_CHECK(!on_cuda || zeropage::offload::cuda::is_built(),
           "--device cuda: built without CUDA; cmake --preset cuda");
  ZP_CHECK(!on_cuda || torch::cuda::is_available(), "--device cuda: LibTorch finds no CUDA device");
  const int64_t of_device = on_cuda ? kDefaultNumelOfCuda : kDefaultNumelOfCpu;
  const int64_t numel = flags.numel > 0 ? flags.numel : of_device;
  const at::Device device = on_cuda ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
  std::printf("%s, %lld elements of fp32, %d rounds, %d intra-op threads; median [least, most]\n",
              device.str().c_str(), static_cast<long long>(numel), flags.rounds,
              at::get_num_threads());
  const auto all = contenders(device, numel);
  report(all, time_interleaved(all, device, flags.rounds), numel);
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app("Times the fused AdamW against at::_fused_adamw_ and copying, interleaved.");
  app.add_option("--device", flags.device, "where")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  app.add_option("--numel", flags.numel, "elements; default 64 Mi on cpu, 1 Gi on cuda")
      ->check(CLI::PositiveNumber);
  app.add_option("--rounds", flags.rounds, "times that every figure is measured")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  constexpr int kRuntimeError = 1;
  constexpr int kUsageError = 2;
  try {
    app.parse(argc, argv);
    run(flags);
    return 0;
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kUsageError;
  } catch (const std::exception& error) {
    std::cerr << "optimizer_step: " << zeropage::memory::message_of(error) << std::endl;
    return kRuntimeError;
  }
}
