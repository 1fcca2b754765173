// Times what Zeropage does with a module of many small parameters, by stage and number of parameters:
// wrapping, and each part of a step. many_tensors --help.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <torch/nn/module.h>
#include <torch/optim/adamw.h>

#include "bench/json_file.h"
#include "bench/measuring_main.h"
#include "bench/spread.h"
#include "zeropage/zeropage.h"

namespace {

namespace fs = std::filesystem;
using bench::Spread;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;
using zeropage::comm::World;

struct Flags {
  std::vector<int64_t> tensors = {1000, 4000, 16000};
  std::vector<int> stages = {0, 1, 2, 3};
  int64_t numel = 4;
  int ranks = 1;
  int64_t groups = 1;
  int steps = 5;
  std::string state_bits = "fp32";
  std::string dtype = "fp32";
  std::string offload = "none";
  std::string offload_step = "step";
  std::string save;
  std::string json;
};

struct ManyParametersImpl : torch::nn::Module {
  ManyParametersImpl(int64_t count, int64_t numel) {
    for (int64_t i = 0; i < count; ++i) {
      register_parameter("weight" + std::to_string(i), at::ones({numel}));
    }
  }
  // Each is used by one operator, as a norm or a bias is.
  at::Tensor forward() const {
    std::vector<at::Tensor> sums;
    for (const at::Tensor& parameter : parameters()) sums.push_back(parameter.sum());
    return at::stack(sums).sum();
  }
};
TORCH_MODULE(ManyParameters);

using Model = zeropage::DistributedDataParallel<ManyParameters>;
using Optimizer = zeropage::Optimizer<torch::optim::AdamW>;

// By part, in the order of their first mention; one figure for each time that a part was timed.
class Times {
 public:
  template <typename Run>
  auto time(const std::string& part, Run run) {
    const auto begin = std::chrono::steady_clock::now();
    const auto note = [&] {
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
      of(part).rounds.push_back(taken.count());
    };
    if constexpr (std::is_void_v<decltype(run())>) {
      run();
      note();
    } else {
      auto made = run();
      note();
      return made;
    }
  }

  const std::vector<std::pair<std::string, Spread>>& all() const { return parts_; }

 private:
  Spread& of(const std::string& part) {
    const auto known = std::find_if(parts_.begin(), parts_.end(),
                                    [&](const auto& other) { return other.first == part; });
    if (known != parts_.end()) return known->second;
    return parts_.emplace_back(part, Spread()).second;
  }

  std::vector<std::pair<std::string, Spread>> parts_;
};

zeropage::Options options_of(const Flags& flags, int stage) {
  zeropage::Options options;
  options.stage = zeropage::stage_of(stage);
  if (flags.dtype == "bf16") options.compute_dtype = at::kBFloat16;
  if (flags.state_bits == "bf16") {
    options.optimizer_state = zeropage::StateFormat::kBf16;
  }
  if (flags.offload == "host") options.offload.optimizer = zeropage::memory::Tier::kHost;
  if (flags.offload_step == "backward") options.offload.step = zeropage::StepWhen::kInBackward;
  return options;
}

// Parameter i is in group i modulo their number, so that neighbours have options of their own.
std::vector<OptimizerParamGroup> groups_of(const Model& model, int64_t count) {
  std::vector<std::vector<at::Tensor>> tensors(static_cast<size_t>(count));
  size_t next = 0;
  for (const at::Tensor& parameter : model.parameters()) {
    tensors[next++ % tensors.size()].push_back(parameter);
  }
  std::vector<OptimizerParamGroup> groups;
  for (size_t group = 0; group < tensors.size(); ++group) {
    auto options = std::make_unique<AdamWOptions>(1e-3);
    options->weight_decay(group % 2 == 0 ? 0.01 : 0);
    groups.emplace_back(std::move(tensors[group]), std::move(options));
  }
  return groups;
}

Times measure(const Flags& flags, const World& world, int stage, int64_t count) {
  Times times;
  ManyParameters module(count, flags.numel);
  const auto model = times.time(
      "wrapping", [&] { return std::make_unique<Model>(module, world, options_of(flags, stage)); });
  const auto optimizer = times.time("optimizer", [&] {
    return std::make_unique<Optimizer>(*model, groups_of(*model, flags.groups));
  });
  for (int step = 0; step < flags.steps; ++step) {
    const at::Tensor loss = times.time("forward", [&] { return (*model)(); });
    times.time("backward", [&] { loss.backward(); });
    if (flags.offload_step == "step") {
      times.time("norm", [&] { zeropage::gradient_norm(*model); });
    }
    times.time("step", [&] { optimizer->step(); });
    times.time("zero_grad", [&] { optimizer->zero_grad(); });
    (*model)().backward();
    optimizer->step();
    times.time("zeroing", [&] { optimizer->zero_grad(/*set_to_none=*/false); });
  }
  times.time("owned shards", [&] {
    zeropage::visit_owned_shards(*model, *optimizer, [](const zeropage::OwnedShard&) {});
  });
  times.time("guard", [&] {
    const zeropage::GatheredParameters guard(*model, zeropage::Modified::on_every_rank());
  });
  times.time("average", [&] {
    zeropage::WeightAverage average(*model);
    average.update();
    average.swap_in();
    average.swap_out();
  });
  if (flags.save.empty()) return times;
  const fs::path folder = fs::path(flags.save) / "state";
  times.time("saving", [&] { zeropage::save_state(folder, *model, *optimizer); });
  times.time("loading", [&] { zeropage::load_state(folder, *model, *optimizer); });
  return times;
}

constexpr double kMsPerSecond = 1e3;

void print_row(int stage, int64_t count, const Times& times) {
  if (count == 0) return;
  std::printf("| %d | %ld |", stage, static_cast<long>(count));
  for (const auto& [part, spread] : times.all()) {
    std::printf(" %.1f |", spread.median() * kMsPerSecond);
  }
  std::printf("\n");
  std::fflush(stdout);
}

void print_head(const Times& times) {
  std::printf("| stage | tensors |");
  for (const auto& [part, spread] : times.all()) std::printf(" %s |", part.c_str());
  std::printf("\n|---|---|");
  for (size_t part = 0; part < times.all().size(); ++part) std::printf("---|");
  std::printf("\n");
}

void print_table(const Flags& flags) {
  std::printf("%d rank(s), tensors of %ld elements in %ld group(s), milliseconds\n\n", flags.ranks,
              static_cast<long>(flags.numel), static_cast<long>(flags.groups));
  nlohmann::json rows = nlohmann::json::array();
  bool has_head = false;
  for (const int stage : flags.stages) {
    for (const int64_t count : flags.tensors) {
      World::threads(flags.ranks, [&](const World& world) {
        const Times times = measure(flags, world, stage, count);
        if (world.rank() != 0) return;
        if (!has_head) print_head(times);
        has_head = true;
        print_row(stage, count, times);
        nlohmann::json row = {{"stage", stage}, {"tensors", count}};
        for (const auto& [part, spread] : times.all()) {
          row["seconds"][part] = bench::spread_json(spread);
        }
        rows.push_back(std::move(row));
      });
    }
  }
  bench::write_json(flags.json, rows);
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app("Times wrapping and the parts of a step of a module of many small parameters.");
  app.option_defaults()->always_capture_default();
  app.add_option("--tensors", flags.tensors, "Numbers of parameters")->delimiter(',');
  app.add_option("--stages", flags.stages, "Stages")->delimiter(',')->check(CLI::Range(0, 3));
  app.add_option("--numel", flags.numel, "Elements of a parameter")->check(CLI::Range(1, 1 << 30));
  app.add_option("--ranks", flags.ranks, "Ranks, which are threads")->check(CLI::Range(1, 1 << 30));
  app.add_option("--groups", flags.groups, "Parameter groups, whose parameters alternate")
      ->check(CLI::Range(1, 1 << 30));
  app.add_option("--steps", flags.steps, "Steps, of whose times the median is printed")
      ->check(CLI::Range(1, 1 << 30));
  app.add_option("--dtype", flags.dtype, "The dtype of the parameters")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--states", flags.state_bits, "The format of the optimizer's states")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--offload", flags.offload, "Where the optimizer's states are")
      ->check(CLI::IsMember({"none", "host"}));
  app.add_option("--offload-step", flags.offload_step, "When offloaded steps are made")
      ->check(CLI::IsMember({"step", "backward"}));
  app.add_option("--save", flags.save,
                 "Folder in which a state is saved and loaded; none: neither");
  app.add_option("--json", flags.json, "File for every figure");
  return bench::parse_and_measure("many_tensors", app, argc, argv, [&] { print_table(flags); });
}
