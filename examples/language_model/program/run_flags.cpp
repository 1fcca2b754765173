#include "language_model/program/run_flags.h"

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <thread>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <torch/torch.h>
#include <zeropage/bytes.h>
#include <zeropage/check.h>

#include "command_line/command_line.h"
#include "progress/words.h"

namespace zp_lm {
namespace {

constexpr const char* kRanks = "Ranks";
constexpr const char* kModel = "Model";

int threads_of(const RunFlags& flags, int local_ranks) {
  if (flags.threads > 0) return flags.threads;
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / local_ranks);
}

}  // namespace

void add_run_flags(CLI::App& app, RunFlags& flags) {
  app.add_option("--ranks", flags.ranks, "Local ranks to start, unless a launcher did")
      ->check(CLI::Range(1, 64))
      ->group(kRanks);
  app.add_flag("--as-threads", flags.as_threads, "Run these ranks as threads of one process")
      ->group(kRanks);
  app.add_option("--device", flags.device, "Where ranks compute")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->group(kRanks);
  app.add_option("--threads", flags.threads,
                 "Threads of a rank; 0: the cores, shared among local ranks")
      ->check(examples::non_negative())
      ->group(kRanks);
  app.add_option("--stage", flags.stage,
                 "What is sharded over ranks: 3: parameters, gradients and the optimizer's states; "
                 "2: the latter two; 1: states; 0: nothing")
      ->check(CLI::Range(0, 3))
      ->group(kRanks);
  app.add_option("--dtype", flags.dtype,
                 "What is computed in; fp64 compares runs, and takes twice the memory")
      ->check(CLI::IsMember({"fp32", "bf16", "fp64"}))
      ->group(kRanks);
  examples::add_bytes(app, "--page-bytes", flags.page_bytes, 0,
                      "Size of a page of parameters; 0: as suits the device")
      ->group(kRanks);
  const std::string memory = "Memory";
  app.add_option(
         "--parameters-on", flags.parameter_tier,
         "Where parameters are that no operator uses, at stage 3; in training --optimizer-on "
         "goes with it")
      ->check(CLI::IsMember({"device", "host", "nvme"}))
      ->group(memory);
  app.add_option("--nvme", flags.nvme_folder, "Folder on a local disk, for the tier nvme")
      ->group(memory);
  examples::add_bytes(app, "--device-memory", flags.device_memory_bytes, 1,
                      "The most bytes of tensors of a rank on its device")
      ->group(memory);
  app.add_option("--json", flags.json, "File for what this run measured");
}

zeropage::Options sharding_of(const RunFlags& flags) {
  zeropage::Options options;
  options.stage = zeropage::stage_of(flags.stage);
  if (flags.dtype != "fp32") options.compute_dtype = dtype_of(flags.dtype);
  options.page_bytes = flags.page_bytes;
  // The optimizer's values are where parameters are, also where nothing is trained.
  options.offload.parameters = options.offload.optimizer = tier_of(flags.parameter_tier);
  ZP_CHECK(flags.parameter_tier != "nvme" || !flags.nvme_folder.empty(),
           "--parameters-on nvme: name a folder on a local disk with --nvme DIR");
  options.offload.nvme_directory = flags.nvme_folder;
  options.device_memory_bytes = flags.device_memory_bytes;
  return options;
}

zeropage::Tier tier_of(const std::string& word) {
  if (word == "host") return zeropage::Tier::kHost;
  return word == "nvme" ? zeropage::Tier::kNvme : zeropage::Tier::kDevice;
}

torch::ScalarType dtype_of(const std::string& word) {
  if (word == "bf16") return torch::kBFloat16;
  if (word == "fp64") return torch::kFloat64;
  return word == "fp16" ? torch::kHalf : torch::kFloat32;
}

void add_export_dtype(CLI::App& app, std::string& dtype) {
  app.add_option(
         "--export-dtype", dtype,
         "What weights are written in; fp32: the optimizer's fp32 values, where weights are "
         "in bf16. Default: --dtype")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
}

std::optional<torch::ScalarType> export_dtype_of(const std::string& word) {
  if (word.empty()) return std::nullopt;
  return dtype_of(word);
}

int on_ranks(const RunFlags& flags, const std::function<int(zeropage::World&)>& run,
             std::optional<std::chrono::milliseconds> grace) {
  zeropage::WorldOptions world_options;
  if (flags.device == "cuda") world_options.device = c10::kCUDA;
  const auto with_threads = [&](zeropage::World& world) {
    torch::set_num_threads(threads_of(flags, world.local_size()));
    return run(world);
  };
  if (zeropage::launched_by_environment()) {
    ZP_CHECK(!flags.as_threads,
             "--as-threads: a launcher has started the ranks as processes already; leave it out");
    auto world = zeropage::World::from_environment(world_options);
    return with_threads(world);
  }
  if (flags.as_threads) {
    std::atomic<int> code = 0;
    zeropage::World::threads(flags.ranks, [&](zeropage::World& world) { code = run(world); },
                             world_options, {.threads_per_rank = threads_of(flags, flags.ranks)});
    return code;
  }
  zeropage::LaunchOptions launch;
  if (grace) launch.grace = *grace;
  return zeropage::World::launch(flags.ranks, with_threads, world_options, launch);
}

void add_model_flags(CLI::App& app, ModelFlags& flags) {
  app.add_option("--model", flags.model,
                 "A .gguf file, or a folder with Hugging Face's config.json and safetensors")
      ->required()
      ->group(kModel);
  app.add_option("--tokenizer", flags.tokenizer,
                 "A .gguf file, a tokenizer.json, or a folder with one; default: the model's")
      ->group(kModel);
  app.add_option("--adapters", flags.adapters,
                 "Folder of adapters that `zp-lm lora` or peft wrote, for this model")
      ->group(kModel);
}

void check_out(const std::string& folder, const ModelFlags& model) {
  if (folder.empty()) return;
  std::error_code error;
  const bool is_own = std::filesystem::equivalent(folder, model.model, error);
  ZP_CHECK(!is_own, folder,
           ": is where the model is read from, which would be lost; give another folder to write "
           "to");
  std::filesystem::create_directories(folder, error);
  const bool is_writable = !error && ::access(folder.c_str(), W_OK | X_OK) == 0;
  ZP_CHECK(is_writable && std::filesystem::is_directory(folder), folder,
           ": expected a folder to write to, got ",
           error ? error.message() : "one that cannot be written to",
           "; give another --out or --merged");
}

std::string tokenizer_path(const ModelFlags& flags) {
  return flags.tokenizer.empty() ? flags.model : flags.tokenizer;
}

zeropage::text::Tokenizer tokenizer_of(const ModelFlags& flags,
                                       const language_model::ModelFiles& files) {
  using zeropage::text::Tokenizer;
  auto tokenizer = flags.tokenizer.empty() && files.gguf()
                       ? Tokenizer::from_gguf(*files.gguf())
                       : Tokenizer::from_path(tokenizer_path(flags));
  ZP_CHECK(tokenizer.vocabulary_size() <= files.config().vocabulary, tokenizer.name(),
           ": has tokens up to ", tokenizer.vocabulary_size() - 1,
           ", and the model's vocabulary ends at ", files.config().vocabulary - 1,
           "; give the model's own with --tokenizer");
  return tokenizer;
}

zeropage::text::ChatTemplate chat_template_of(const zeropage::text::Tokenizer& tokenizer) {
  using zeropage::text::ChatTemplate;
  return tokenizer.id_of("<|im_start|>") ? ChatTemplate::kChatMl : ChatTemplate::kPlain;
}

std::string read_text(const std::string& path, const std::string& from) {
  std::ifstream stream(path, std::ios::binary);
  ZP_CHECK(stream && !std::filesystem::is_directory(path), path,
           ": cannot be read; expected a file of text");
  std::string text{std::istreambuf_iterator<char>(stream), {}};
  const size_t begin = text.find(from);
  ZP_CHECK(begin != std::string::npos, path, ": has no \"", from, "\"");
  return text.substr(begin);
}

std::string OpeningCost::words() const {
  return examples::fixed(static_cast<double>(parameters) / 1e6, 1) +
         " M parameters; highest resident memory of a rank so far " +
         zeropage::format_bytes(resident_peak) + ", " + zeropage::format_bytes(resident_before) +
         " of them before the model was opened";
}

OpeningCost opening_cost(const zeropage::World& world, int64_t parameters,
                         int64_t resident_before) {
  const auto most = [&](int64_t bytes) {
    return static_cast<int64_t>(world.max(static_cast<double>(bytes)));
  };
  return {.parameters = parameters,
          .resident_before = most(resident_before),
          .resident_peak = most(zeropage::memory::peak_resident_bytes())};
}

}  // namespace zp_lm
