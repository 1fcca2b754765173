// Seconds to save training state, against a plain O_DIRECT write of the same bytes and torch::save, in
// turns; how long a step waits for a save beside training, against a copy of the bytes; and what such a
// save costs the work beside it. state_io --help.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/serialize.h>

#include "bench/json_file.h"
#include "bench/measuring_main.h"
#include "bench/spread.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"
#include "zeropage/saved_state.h"
#include "zeropage/zeropage.h"

namespace {

using bench::quotient;
using bench::Spread;
using bench::spread_json;
using Clock = std::chrono::steady_clock;
namespace fs = std::filesystem;

struct Flags {
  std::string folder = ".";
  int64_t mebibytes = 256;  // of parameters
  int rounds = 5;
  int work_seconds = 3;
  std::string dcp_python;
  std::string json;
};

double seconds_of(const std::function<void()>& action) {
  const auto start = Clock::now();
  action();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Free {
  void operator()(char* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<char, Free>;

Memory touched_memory(uint64_t bytes) {
  const uint64_t rounded = (bytes + 4095) / 4096 * 4096;
  Memory memory(static_cast<char*>(std::aligned_alloc(4096, rounded)));
  if (memory == nullptr) throw std::bad_alloc();
  std::memset(memory.get(), 1, rounded);
  return memory;
}

// What a disk takes from a program that does nothing else: 8 MiB at a time, one after the other.
void write_directly(const fs::path& path, const char* from, uint64_t bytes) {
  constexpr uint64_t kAtOnce = 8 << 20;
  fs::remove(path);
  using zeropage::state::File;
  bytes -= bytes % 4096;
  { File(path, File::Access::kCreate).allocate(bytes); }
  File file(path, File::Access::kWrite, /*direct=*/true);
  for (uint64_t offset = 0; offset < bytes; offset += kAtOnce) {
    file.write(offset, from + offset, std::min(kAtOnce, bytes - offset));
  }
  file.sync();
}

// Saves the same tensors as a user would; LibTorch does not wait for the disk, so that is done here.
void torch_save(const fs::path& path, const std::vector<at::Tensor>& tensors) {
  torch::save(tensors, path.string());
  zeropage::state::File(path, zeropage::state::File::Access::kWrite).sync();
}

// In a process of its own, which times itself.
double dcp_seconds(const Flags& flags, const fs::path& folder) {
  const std::string command = "'" + flags.dcp_python + "' '" BENCH_FOLDER "/state_io/dcp.py' '" +
                              folder.string() + "' " + std::to_string(flags.mebibytes);
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(::popen(command.c_str(), "r"), ::pclose);
  double seconds = 0;
  ZP_CHECK(pipe != nullptr && std::fscanf(pipe.get(), "%lf", &seconds) == 1,
           "--dcp-python: expected seconds from ", command, ", got none; has it torch and numpy?");
  return seconds;
}

// Work that keeps one core busy, a piece of it at a time.
class Work {
 public:
  double seconds_a_piece(double for_seconds, const std::function<bool()>& goes_on) {
    Spread pieces;
    const auto start = Clock::now();
    while (goes_on() && std::chrono::duration<double>(Clock::now() - start).count() < for_seconds) {
      pieces.rounds.push_back(seconds_of([&] { at::mm_out(product_, a_, b_); }));
    }
    return pieces.rounds.empty() ? 0 : pieces.median();
  }

 private:
  at::Tensor a_ = at::randn({384, 384}), b_ = at::randn({384, 384});
  at::Tensor product_ = at::empty({384, 384});
};

struct LayersImpl : torch::nn::Module {
  LayersImpl(int64_t layers, int64_t width) {
    for (int64_t layer = 0; layer < layers; ++layer) {
      register_module("layer" + std::to_string(layer),
                      torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)));
    }
  }
};

nlohmann::json line(const char* name, const Spread& seconds, double bytes, const Spread& direct) {
  const Spread ratio = quotient(direct, seconds);
  std::printf("%-26s %8.3f s %8.2f GB/s   of plain O_DIRECT's speed: %.3f [%.3f, %.3f]\n", name,
              seconds.median(), bytes / seconds.median() / 1e9, ratio.median(), ratio.least(),
              ratio.most());
  return {{"seconds", spread_json(seconds)},
          {"bytes_per_second", bytes / seconds.median()},
          {"of_direct_speed", spread_json(ratio)}};
}

void measure(const Flags& flags) {
  at::set_num_threads(1);
  const auto world = zeropage::comm::World::from_environment();
  constexpr int64_t kWidth = 1024;
  const int64_t layers = std::max<int64_t>(1, flags.mebibytes / 4);
  zeropage::DistributedDataParallel<std::shared_ptr<LayersImpl>> model(
      std::make_shared<LayersImpl>(layers, kWidth), world, {});
  zeropage::Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(1e-3));
  const fs::path folder = fs::path(flags.folder) / "state-io-bench";
  fs::create_directories(folder);
  const auto bytes =
      static_cast<uint64_t>(zeropage::save_state(folder / "step-0", model, optimizer).bytes);
  const Memory from = touched_memory(bytes);
  const Memory to = touched_memory(bytes);
  std::vector<at::Tensor> tensors;
  for (const auto& parameter : model.parameters()) {
    for (int copy = 0; copy < 3; ++copy) tensors.push_back(parameter.detach().clone());
  }
  zeropage::StateSaver saver(folder / "beside", world, {.keep_last = 1});
  saver.save(model, optimizer, {.step = 1});
  saver.wait();

  Spread direct, ours, torch_saves, dcp_saves, copy, blocked, alone, beside;
  Work work;
  for (int round = 0; round < flags.rounds; ++round) {
    direct.rounds.push_back(
        seconds_of([&] { write_directly(folder / "direct", from.get(), bytes); }));
    fs::remove_all(folder / "step-0");
    ours.rounds.push_back(
        seconds_of([&] { zeropage::save_state(folder / "step-0", model, optimizer); }));
    torch_saves.rounds.push_back(seconds_of([&] { torch_save(folder / "torch.pt", tensors); }));
    if (!flags.dcp_python.empty()) {
      dcp_saves.rounds.push_back(dcp_seconds(flags, folder / "dcp"));
    }
    copy.rounds.push_back(seconds_of([&] { std::memcpy(to.get(), from.get(), bytes); }));
    const double usual = work.seconds_a_piece(flags.work_seconds, [] { return true; });
    blocked.rounds.push_back(saver.save(model, optimizer, {.step = 2 + round}));
    const double during =
        work.seconds_a_piece(flags.work_seconds, [&] { return saver.is_saving(); });
    saver.wait();
    if (during > 0) {
      alone.rounds.push_back(usual);
      beside.rounds.push_back(during);
    }
  }
  std::printf("%s of state, %d rounds\n",
              zeropage::memory::format_bytes(static_cast<int64_t>(bytes)).c_str(), flags.rounds);
  nlohmann::json json = {{"bytes", bytes}};
  const auto size = static_cast<double>(bytes);
  json["direct"] = line("plain O_DIRECT write", direct, size, direct);
  json["save_state"] = line("save_state", ours, size, direct);
  json["torch_save"] = line("torch::save and fsync", torch_saves, size, direct);
  if (!dcp_saves.rounds.empty()) json["dcp"] = line("DCP, sync", dcp_saves, size, direct);
  const Spread waits = quotient(blocked, copy);
  std::printf(
      "a save beside training: training waits %.3f s, memcpy takes %.3f s; ratio %.3f "
      "[%.3f, %.3f]\n",
      blocked.median(), copy.median(), waits.median(), waits.least(), waits.most());
  json["blocked"] = {{"seconds", spread_json(blocked)}, {"of_memcpy", spread_json(waits)}};
  if (!alone.rounds.empty()) {
    const Spread slower = quotient(beside, alone);
    std::printf("work on one core meanwhile takes %.3f [%.3f, %.3f] of its usual time\n",
                slower.median(), slower.least(), slower.most());
    json["work_beside"] = spread_json(slower);
  }
  fs::remove_all(folder);
  bench::write_json(flags.json, json);
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app("Times saves of training state against the disk's own speed, in turns.", "state_io");
  app.option_defaults()->always_capture_default();
  app.add_option("--folder", flags.folder, "On the disk to measure");
  app.add_option("--mebibytes", flags.mebibytes,
                 "MiB of fp32 parameters; the state is three times that")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--rounds", flags.rounds, "Rounds of each, in turns")->check(CLI::Range(1, 1000));
  app.add_option("--work-seconds", flags.work_seconds, "Seconds of work alone, in each round")
      ->check(CLI::Range(0, 600));
  app.add_option("--dcp-python", flags.dcp_python,
                 "An interpreter with torch and numpy, to time torch.distributed.checkpoint too");
  app.add_option("--json", flags.json, "Where to write all figures");
  return bench::parse_and_measure("state_io", app, argc, argv, [&] { measure(flags); });
}
