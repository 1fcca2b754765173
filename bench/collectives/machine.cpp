#include "bench/collectives/machine.h"

#include <benchmark/benchmark.h>
#include <fstream>

#include <torch/version.h>

namespace collectives {
namespace {

std::string cpu_model() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    const size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) {
      return line.substr(colon + 2);
    }
  }
  return "unknown";
}

}  // namespace

Machine describe_machine() {
  const benchmark::CPUInfo& cpu = benchmark::CPUInfo::Get();
  return {.host = benchmark::SystemInfo::Get().name,
          .cpu = cpu_model(),
          .cores = cpu.num_cpus,
          .load = cpu.load_avg.empty() ? 0 : cpu.load_avg.front(),
          .libtorch = TORCH_VERSION};
}

}  // namespace collectives
