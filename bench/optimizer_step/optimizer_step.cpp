// Times the fused AdamW against at::_fused_adamw_ and against copying, interleaved.
// optimizer_step --help.
#include <algorithm>
#include <cstdio>
#include <map>
#include <string>

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <torch/cuda.h>

#include "bench/json_file.h"
#include "bench/measuring_main.h"
#include "bench/optimizer_step/contenders.h"
#include "bench/spread.h"
#include "optim/cpu/instructions.h"
#include "optim/cuda/fused_step.h"
#include "zeropage/check.h"

namespace {

using bench::Spread;
using bench::spread_json;
using optimizer_step::Group;
using optimizer_step::Ratio;

struct Flags {
  std::string device = "cpu";
  std::vector<int64_t> numels;
  int64_t tensors = 10000;
  int threads = 0;
  int rounds = 9;
  std::string json;
};

// For people: stdout, unless that is for the JSON.
FILE* text_of(const Flags& flags) {
  return flags.json == "-" ? stderr : stdout;
}

nlohmann::json report_ratio(const Ratio& ratio, const std::vector<Spread>& seconds, FILE* text) {
  const Spread spread = quotient(seconds[ratio.slow], seconds[ratio.fast]);
  std::fprintf(text, "%s: %.2f [%.2f, %.2f]", ratio.name.c_str(), spread.median(), spread.least(),
               spread.most());
  nlohmann::json json = spread_json(spread);
  if (ratio.goal > 0) {
    const bool reached = spread.median() >= ratio.goal;
    std::fprintf(text, " (goal %.2f: %s)", ratio.goal, reached ? "yes" : "no");
    json["goal"] = ratio.goal;
    json["reached"] = reached;
  }
  std::fprintf(text, "\n");
  return json;
}

nlohmann::json report(const Group& group, const std::vector<Spread>& seconds, FILE* text) {
  nlohmann::json json = {{"name", group.name}, {"numel", group.numel}};
  std::fprintf(text, "\n%s, %lld elements\n", group.name.c_str(),
               static_cast<long long>(group.numel));
  for (size_t i = 0; i < group.contenders.size(); ++i) {
    const std::string& name = group.contenders[i].name;
    const double gigabytes = static_cast<double>(group.bytes[i] * group.numel) * 1e-9;
    std::fprintf(text, "%-24s %9.3f ms  %7.1f GB/s [%.1f, %.1f]\n", name.c_str(),
                 seconds[i].median() * 1e3, gigabytes / seconds[i].median(),
                 gigabytes / seconds[i].most(), gigabytes / seconds[i].least());
    json["seconds"][name] = spread_json(seconds[i]);
    json["bytes_per_element"][name] = group.bytes[i];
  }
  for (const Ratio& ratio : group.ratios) {
    json["ratios"][ratio.name] = report_ratio(ratio, seconds, text);
  }
  std::fflush(text);
  return json;
}

std::vector<int64_t> numels_of(const Flags& flags) {
  if (!flags.numels.empty()) return flags.numels;
  constexpr int64_t kMi = int64_t{1} << 20;
  return flags.device == "cuda" ? std::vector{1024 * kMi} : std::vector{64 * kMi, 256 * kMi};
}

// Few elements: without any of the instructions a step takes so long that it would be most of the time.
int64_t numel_of_each_set(const Flags& flags) {
  constexpr int64_t kMost = int64_t{16} << 20;
  return std::min(numels_of(flags).front(), kMost);
}

void run(const Flags& flags) {
  const bool on_cuda = flags.device == "cuda";
  ZP_CHECK(!on_cuda || zeropage::optim::cuda::is_built(),
           "--device cuda: built without CUDA; cmake --preset cuda");
  ZP_CHECK(!on_cuda || torch::cuda::is_available(), "--device cuda: LibTorch finds no CUDA device");
  const at::Device device = on_cuda ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
  const at::NoGradGuard no_grad;
  if (flags.threads > 0) at::set_num_threads(flags.threads);
  FILE* const text = text_of(flags);
  const std::string instructions(
      zeropage::optim::cpu::name_of(zeropage::optim::cpu::best_instructions()));
  std::fprintf(text,
               "AdamW in fp32 on %s, %d rounds, %d intra-op threads, the CPU's loops with %s; "
               "median [least, most]\n",
               device.str().c_str(), flags.rounds, at::get_num_threads(), instructions.c_str());
  nlohmann::json json = {{"device", device.str()},
                         {"threads", at::get_num_threads()},
                         {"cpu_capability", instructions}};
  const auto time_and_report = [&](const Group& group) {
    const auto seconds = bench::time_interleaved(group.contenders, device, flags.rounds);
    json["groups"].push_back(report(group, seconds, text));
    // After each: what was measured is there even if a later group is stopped.
    if (flags.json != "-") bench::write_json(flags.json, json);
  };
  for (const int64_t numel : numels_of(flags)) {
    time_and_report(optimizer_step::flat_group(device, numel));
  }
  if (!on_cuda) time_and_report(optimizer_step::instructions_group(numel_of_each_set(flags)));
  time_and_report(optimizer_step::list_group(device, flags.tensors));
  if (flags.json == "-") bench::write_json(flags.json, json);
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app("Times the fused AdamW against at::_fused_adamw_ and copying, interleaved.");
  app.add_option("--device", flags.device, "where")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  app.add_option("--numel", flags.numels,
                 "elements, or a list with commas; default 64Mi,256Mi on cpu, 1Gi on cuda")
      ->delimiter(',')
      ->transform(CLI::AsNumberWithUnit(
          std::map<std::string, int64_t>{
              {"Ki", int64_t{1} << 10}, {"Mi", int64_t{1} << 20}, {"Gi", int64_t{1} << 30}},
          CLI::AsNumberWithUnit::CASE_SENSITIVE, "ELEMENTS"))
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40));
  app.add_option("--tensors", flags.tensors, "tensors of 1,000 elements that a list has")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->capture_default_str();
  app.add_option("--threads", flags.threads, "intra-op threads; default LibTorch's")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40));
  app.add_option("--rounds", flags.rounds, "times that every figure is measured")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--json", flags.json,
                 "file for every figure of every round, or - for stdout, the text then on stderr");
  return bench::parse_and_measure("optimizer_step", app, argc, argv, [&] { run(flags); });
}
