#include "bench/train_gpt/utilisation.h"

#include <string>

#include "zeropage/device.h"

namespace train_gpt {
namespace {

// NVIDIA's data sheets, dense.
struct KnownDevice {
  const char* part_of_name;
  double bf16_tflops;
  double fp32_tflops;  // without TF32, which LibTorch leaves off
};
constexpr KnownDevice kKnownDevices[] = {
    {"H200", 989, 67}, {"H100 PCIe", 756, 51}, {"H100", 989, 67}, {"A100", 312, 19.5}};

}  // namespace

double flops_per_token(const GptConfig& model, int64_t parameters) {
  return 6 * static_cast<double>(parameters) +
         12 * static_cast<double>(model.layers * model.d_model * model.sequence);
}

std::optional<double> peak_flops(const Flags& flags, torch::Device device) {
  constexpr double kTera = 1e12;
  if (flags.peak_tflops > 0) return flags.peak_tflops * kTera;
  if (!device.is_cuda() || flags.dtype() == torch::kFloat64) return std::nullopt;
  const std::string name = zeropage::memory::device_name(device);
  for (const KnownDevice& known : kKnownDevices) {
    if (name.find(known.part_of_name) == std::string::npos) continue;
    const bool low = flags.dtype() != torch::kFloat32;  // fp16 has bf16's rate
    return (low ? known.bf16_tflops : known.fp32_tflops) * kTera;
  }
  return std::nullopt;
}

}  // namespace train_gpt
