#include "examples/train_gpt/flags.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <vector>

#include <CLI/CLI.hpp>

#include "accumulate/batch_arithmetic.h"
#include "comm/rendezvous.h"
#include "device/device.h"
#include "examples/train_gpt/accumulation_flags.h"
#include "examples/train_gpt/value_options.h"
#include "memory/check.h"
#include "zero/options.h"

namespace train_gpt {
namespace {

constexpr int kUsageError = 2;

// Flags of the design whose feature this version lacks: the values that mean "without it", and what
// is missing.
struct Missing {
  const char* flag;
  const char* values;
  std::vector<std::string> accepted;
  const char* feature;
};

const std::vector<Missing>& missing_features() {
  static const std::vector<Missing> features = {
      {"--report", "FILE.html", {}, "the HTML report"},
  };
  return features;
}

void add_missing(CLI::App& app, std::map<std::string, std::string>& given) {
  const std::string group = "Not in this version (refused unless it changes nothing)";
  for (const Missing& missing : missing_features()) {
    const std::string flag = missing.flag;
    CLI::Option* option = nullptr;
    if (*missing.values == '\0') {
      option = app.add_flag_callback(
          flag, [&given, flag] { given[flag] = "true"; }, missing.feature);
    } else {
      option = app.add_option_function<std::string>(
          flag, [&given, flag](const std::string& value) { given[flag] = value; }, missing.feature);
      option->option_text(missing.values);
    }
    option->group(group);
  }
}

void refuse_missing(const std::map<std::string, std::string>& given) {
  for (const Missing& missing : missing_features()) {
    const auto at = given.find(missing.flag);
    if (at == given.end()) continue;
    const auto& accepted = missing.accepted;
    if (std::find(accepted.begin(), accepted.end(), at->second) != accepted.end()) continue;
    throw CLI::ValidationError(c10::str(missing.flag, " ", at->second, ": ", missing.feature,
                                        " is not in this version; ",
                                        accepted.empty() || accepted.front() == "false"
                                            ? "leave the flag out"
                                            : "use " + accepted.back() + " or leave it out"));
  }
}

void check_values(const Flags& flags) {
  const auto require = [](bool condition, const std::string& message) {
    if (!condition) throw CLI::ValidationError(message);
  };
  require(std::isfinite(flags.lr) && flags.lr >= 0,
          c10::str("--lr ", flags.lr, ": expected a finite number >= 0, such as 3e-4"));
  require(
      flags.model.d_model % flags.model.heads == 0,
      c10::str("--heads ", flags.model.heads, ": does not divide --d-model ", flags.model.d_model));
  require(flags.stage >= 0 && flags.stage <= 3,
          c10::str("--stage ", flags.stage, ": expected 0, 1, 2 or 3"));
  if (flags.injection) {
    require(flags.injection->layer < flags.model.layers &&
                flags.injection->micro_step < flags.accumulate &&
                flags.injection->step < flags.steps,
            "--inject-inf: no such layer, micro-step or step");
  }
  require(flags.parameter_budget_bytes == 0 || flags.stage == 3,
          "--parameter-budget: only stage 3 shards parameters; leave it out or use --stage 3");
  require(flags.prefetch || flags.stage == 3,
          "--prefetch off: only stage 3 fetches parameters; leave it out or use --stage 3");
  require(flags.reshard == "use" || flags.stage == 3,
          "--reshard: only stage 3 shards parameters; leave it out or use --stage 3");
  const double dropout = flags.model.dropout;
  require(
      dropout >= 0 && dropout < 1,
      c10::str("--dropout ", dropout, ": expected a probability from 0 to below 1, such as 0.1"));
  require(dropout == 0 || !flags.world_invariant,
          "--dropout: each rank draws its own masks, so no split has another's bits; leave it or "
          "--world-invariant out");
  check_accumulation(flags);
  flags.offload.check(flags.stage);
  flags.state.check();
  require(
      !flags.simulates() || (!flags.state.saves() && flags.state.resume.empty()),
      "--communicator simulated: its tensors have no values to save or resume; leave --save and "
      "--resume out");
  require(
      (!flags.state.saves() && flags.state.resume.empty()) || flags.offload.step != "late",
      "--offload-step late: a step is always under way, so no state is whole; use another step, "
      "or leave --save and --resume out");
  require(!flags.simulates() || !flags.offload.any(),
          "--communicator simulated: computes no values to offload; leave --offload-optimizer and "
          "--offload-parameters out");
  flags.checkpointing.check(flags.model.layers);
  require(!flags.simulates() || !flags.checkpointing.sees_values(),
          "--communicator simulated: computes no values to measure or offload; use "
          "--checkpoint-activations none, blocks or every:K, and no --offload-activations");
  if (flags.device == "cuda" && !zeropage::memory::has_cuda_driver()) {
    // Only here, where no rank will be forked, may CUDA be asked why.
    require(false, "--device cuda: " + zeropage::memory::obstacle_to({c10::kCUDA, 0}));
  }
  const bool on_cuda = flags.device_type() == torch::kCUDA;
  require(flags.communicator != "nccl" || on_cuda,
          "--communicator nccl: moves tensors between CUDA devices; use --device cuda, or auto, "
          "gloo or shared");
  require(!flags.simulates() || flags.device != "cuda",
          "--device cuda: a simulated run computes no values; leave it out");
  require(flags.memory_snapshot_path.empty() || on_cuda,
          "--memory-snapshot: is of CUDA's allocator; use --device cuda or leave it out");
  require(flags.peak_tflops >= 0,
          c10::str("--peak-tflops ", flags.peak_tflops, ": expected a number > 0"));
  require(flags.deadline_seconds > 0,
          c10::str("--deadline ", flags.deadline_seconds, ": expected seconds > 0"));
}

void add_checkpointing(CLI::App& app, CheckpointFlags& flags) {
  app.add_option_function<std::string>(
         "--checkpoint-activations",
         [&flags](const std::string& text) { flags.parse_policy(text); },
         "Activations that are not kept until backward but computed again: of each block, of "
         "regions "
         "of K blocks but the last one (sqrt: of their square root)")
      ->option_text("{none,blocks,every:K,every:sqrt,selective,budget:BYTES}=none");
  app.add_option_function<std::string>(
         "--offload-activations", [&flags](const std::string& text) { flags.parse_offload(text); },
         "Where activations are until backward")
      ->option_text("{none,host,nvme:DIR}=none");
}

// Flags of what a simulated run does not have, and of what only it has.
void add_simulation(CLI::App& app, Flags& flags) {
  const std::string group = "With --communicator simulated";
  app.add_option("--ranks-per-host", flags.simulation.ranks_per_host,
                 "Up to 8 ranks are thus on one host, as auto has them; 1: as gloo sends")
      ->check(CLI::Range(1, 4096))
      ->group(group);
  app.add_option("--within-host", flags.simulation.within_host,
                 "A rank's link to ranks of its host: latency in us and GB/s")
      ->check(positive())
      ->group(group);
  app.add_option("--between-hosts", flags.simulation.between_hosts,
                 "A rank's link to ranks of other hosts: latency in us and GB/s")
      ->check(positive())
      ->group(group);
}

void check_simulation(const CLI::App& app, const Flags& flags) {
  const auto refuse = [&](const char* flag, const std::string& why) {
    if (app.get_option(flag)->count() > 0) throw CLI::ValidationError(flag + (": " + why));
  };
  if (!flags.simulates()) {
    for (const char* flag : {"--ranks-per-host", "--within-host", "--between-hosts"}) {
      refuse(flag, "only a simulated run has it; leave it out or use --communicator simulated");
    }
    return;
  }
  const std::string without_values = " a simulated run computes no values; leave it out";
  refuse("--data", "reads text, but" + without_values);
  refuse("--sample", "writes text, but" + without_values);
  refuse("--dropout", "draws masks, but" + without_values);
  refuse("--deadline", "waits for ranks, but a simulated run has no others; leave it out");
  if (flags.deferred == "off") refuse("--deferred", "off: fills the model, but" + without_values);
  if (zeropage::comm::launched_by_environment()) {
    throw CLI::ValidationError(
        "--communicator simulated: runs all ranks in one process; start it without a launcher");
  }
}

void check_launcher(const Flags& flags, bool ranks_given) {
  const auto place = zeropage::comm::read_place();
  if (!zeropage::comm::launched_by_environment() || !ranks_given) return;
  if (flags.ranks != place.world_size) {
    throw CLI::ValidationError(c10::str("--ranks ", flags.ranks, ": ", place.launcher, " started ",
                                        place.world_size,
                                        " ranks; leave --ranks out under a launcher"));
  }
}

// The batch's sizes of which the command line tells some.
void solve_batch(const CLI::App& app, Flags& flags) {
  if (flags.global_batch == 0) return;
  const auto given = [&](const char* flag, int64_t value) {
    return app.get_option(flag)->count() > 0 ? std::optional<int64_t>(value) : std::nullopt;
  };
  const bool launched = zeropage::comm::launched_by_environment();
  zeropage::accumulate::BatchSizes sizes{
      .global_batch = flags.global_batch,
      .micro_batch = given("--batch", flags.batch),
      .accumulation = given("--accumulate", flags.accumulate),
      .ranks = launched ? zeropage::comm::read_place().world_size : flags.ranks};
  if (!sizes.micro_batch && !sizes.accumulation) sizes.micro_batch = flags.batch;
  try {
    const auto solved = zeropage::accumulate::solve_batch(sizes);
    flags.batch = solved.micro_batch;
    flags.accumulate = solved.accumulation;
  } catch (const std::exception& error) {
    throw CLI::ValidationError("--global-batch: " + zeropage::memory::message_of(error));
  }
}

}  // namespace

torch::DeviceType Flags::device_type() const {
  // Asking CUDA itself would initialise it, and then no rank could be forked.
  const bool has_cuda = zeropage::memory::has_cuda_driver();
  return device == "cuda" || (device == "auto" && has_cuda && !simulates()) ? torch::kCUDA
                                                                            : torch::kCPU;
}

torch::ScalarType Flags::dtype() const {
  if (compute_dtype == "bf16") return torch::kBFloat16;
  return compute_dtype == "fp16" ? torch::kHalf : torch::kFloat32;
}

torch::ScalarType Flags::reduce_dtype() const {
  const bool fp32 =
      precision.reduce_dtype == "fp32" || (precision.reduce_dtype == "auto" && world_invariant);
  return fp32 ? torch::kFloat32 : dtype();
}

torch::ScalarType Flags::accumulate_dtype() const {
  const bool sums_up = accumulate > 1 || world_invariant;
  const bool fp32 =
      precision.accumulate_dtype == "fp32" || (precision.accumulate_dtype == "auto" && sums_up);
  return fp32 ? torch::kFloat32 : dtype();
}

int64_t Flags::master_bytes() const {
  if (dtype() == torch::kFloat32) return 0;
  if (precision.update == "split") return 2;
  return precision.update == "master" ? 4 : 0;
}

zeropage::offload::StateFormat Flags::optimizer_state() const {
  using zeropage::offload::StateFormat;
  if (precision.optimizer_state == "8bit") return StateFormat::k8Bit;
  return precision.optimizer_state == "bf16" ? StateFormat::kBf16 : StateFormat::kFp32;
}

nlohmann::json Flags::to_json() const {
  nlohmann::json json = {
      {"data", data},
      {"d-model", model.d_model},
      {"layers", model.layers},
      {"heads", model.heads},
      {"sequence", model.sequence},
      {"batch", batch},
      {"accumulate", accumulate},
      {"steps", steps},
      {"dropout", model.dropout},
      {"seed", seed},
      {"lr", lr},
      {"optimizer", optimizer},
      {"ranks", ranks},
      {"threads", threads},
      {"stage", stage},
      {"device", device},
      {"compute-dtype", compute_dtype},
      {"reduce-dtype", precision.reduce_dtype},
      {"accumulate-dtype", precision.accumulate_dtype},
      {"low-precision-update", precision.update},
      {"optimizer-state", precision.optimizer_state},
      {"keep-fp32", precision.keep_fp32},
      {"loss-scale", precision.loss_scale},
      {"reduce-micro-steps", reduce_micro_steps},
      {"gradient-budget", gradient_budget_bytes},
      {"clip-norm", clip_norm},
      {"spike-z", spike_z},
      {"world-invariant", world_invariant},
      {"deterministic", deterministic},
      {"peak-tflops", peak_tflops},
      {"page-bytes", page_bytes > 0 ? page_bytes : zeropage::page_bytes_on(device_type())},
      {"parameter-budget", parameter_budget_bytes},
      {"prefetch", prefetch ? "on" : "off"},
      {"reshard", reshard},
      {"checkpoint-activations", checkpointing.text},
      {"offload-activations", checkpointing.offload_text},
      {"deferred", deferred},
      {"communicator", communicator},
      {"deadline", deadline_seconds},
      {"sample", sample},
      {"json", json_path},
      {"memory-snapshot", memory_snapshot_path}};
  write_offload(offload, json);
  write_state(state, json);
  // What cannot be chosen yet still has a value.
  for (const Missing& missing : missing_features()) {
    if (!missing.accepted.empty()) json[missing.flag + 2] = missing.accepted.back();
  }
  if (simulates()) {
    json["ranks-per-host"] = simulation.ranks_per_host;
    json["within-host"] = simulation.within_host;
    json["between-hosts"] = simulation.between_hosts;
  }
  return json;
}

std::optional<int> parse_flags(int argc, char** argv, Flags& flags) {
  CLI::App app(
      "Trains a small GPT on text, sharded over ranks, and reports speed, memory and losses.\n"
      "Starts its own ranks on this host (--ranks), unless a launcher did: torchrun, srun, mpirun, "
      "zp run.");
  app.option_defaults()->always_capture_default()->multi_option_policy(
      CLI::MultiOptionPolicy::TakeLast);
  app.add_option("--data", flags.data,
                 "Text file, a folder of headers, or auto: LibTorch's own headers")
      ->option_text("PATH|auto");
  app.add_option("--d-model", flags.model.d_model, "Width")->check(positive());
  app.add_option("--layers", flags.model.layers, "Blocks")->check(positive());
  app.add_option("--heads", flags.model.heads, "Attention heads a block")->check(positive());
  app.add_option("--sequence", flags.model.sequence, "Tokens a sample")->check(positive());
  app.add_option("--dropout", flags.model.dropout,
                 "Of embeddings, attention and what blocks add, from 0 to below 1")
      ->option_text("P=0");
  app.add_option("--batch", flags.batch, "Samples of a micro-batch")->check(positive());
  app.add_option("--accumulate", flags.accumulate,
                 "Micro-batches a rank and step: global batch = batch x accumulate x ranks")
      ->check(positive())
      ->option_text("K=1");
  app.add_option(
         "--global-batch", flags.global_batch,
         "Samples a step over all ranks: gives --accumulate, or --batch where that is given")
      ->check(positive())
      ->option_text("SAMPLES");
  app.add_option("--steps", flags.steps, "Optimizer steps")->check(positive());
  app.add_option("--seed", flags.seed, "Of weights, samples and the continuation");
  app.add_option("--lr", flags.lr, "Learning rate");
  app.add_option("--optimizer", flags.optimizer, "Algorithm")
      ->check(CLI::IsMember({"adamw", "adam", "sgd", "lion", "adagrad"}))
      ->option_text("{adamw,adam,sgd,lion,adagrad}=adamw");
  app.add_option("--device", flags.device, "Where ranks train; auto: cuda where there is a device")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->option_text("{auto,cpu,cuda}=auto");
  app.add_option("--compute-dtype", flags.compute_dtype, "Of parameters, gradients and activations")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}))
      ->option_text("{fp32,bf16,fp16}=fp32");
  add_accumulation(app, flags);
  add_offload(app, flags.offload);
  add_state(app, flags.state);
  app.add_flag("--deterministic", flags.deterministic,
               "The same bits at every stage and run on cuda too, where it costs time");
  CLI::Option* ranks =
      app.add_option("--ranks", flags.ranks, "Local ranks to start")->check(CLI::Range(1, 4096));
  app.add_option("--threads", flags.threads, "Threads a rank; 0 shares the cores among local ranks")
      ->check(non_negative());
  app.add_option("--stage", flags.stage,
                 "What is sharded: 0 nothing, 1 optimizer state, 2 gradients, 3 parameters");
  add_bytes(app, "--page-bytes", flags.page_bytes, 4096,
            "Size of a page, the unit of communication")
      ->option_text("BYTES=16MiB, on cuda 64MiB");
  add_bytes(app, "--parameter-budget", flags.parameter_budget_bytes, 1,
            "Most bytes of whole parameters a rank holds at stage 3; unset: two largest pages")
      ->option_text("BYTES");
  add_switch(app, "--prefetch", flags.prefetch, "Fetch parameters ahead of their use at stage 3");
  app.add_option("--reshard", flags.reshard,
                 "At stage 3 whole parameters go after their use, after backward (one gather less "
                 "a micro-step) or after the step (one gather a step)")
      ->check(CLI::IsMember({"use", "backward", "step"}))
      ->option_text("{use,backward,step}=use");
  app.add_option("--deferred", flags.deferred,
                 "Construct the model without memory for its parameters; auto: at stage 3")
      ->check(CLI::IsMember({"auto", "on", "off"}))
      ->option_text("{auto,on,off}=auto");
  app.add_option(
         "--communicator", flags.communicator,
         "Between ranks: gloo (TCP), shared (memory of one host), auto: shared where it can be "
         "had; the same bits. nccl (between CUDA devices): what auto takes there. simulated: "
         "nothing, the steps run without values, rank after rank, "
         "and what they would send is counted")
      ->check(CLI::IsMember({"auto", "gloo", "shared", "nccl", "simulated"}))
      ->option_text("{auto,gloo,shared,nccl,simulated}=auto");
  app.add_option("--deadline", flags.deadline_seconds,
                 "Seconds a rank waits for another that shows no life");
  app.add_option("--sample", flags.sample, "Characters to write at the end")->check(non_negative());
  app.add_option("--json", flags.json_path, "Where to write every figure")->option_text("FILE");
  app.add_option("--peak-tflops", flags.peak_tflops,
                 "A rank's peak, for the model FLOPs utilisation; 0: the device's where known");
  app.add_option("--memory-snapshot", flags.memory_snapshot_path,
                 "Where to write rank 0's CUDA allocator, for PyTorch's memory_viz")
      ->option_text("FILE");
  add_simulation(app, flags);
  add_checkpointing(app, flags.checkpointing);
  std::map<std::string, std::string> given;
  add_missing(app, given);
  try {
    app.parse(argc, argv);
    refuse_missing(given);
    solve_batch(app, flags);
    check_values(flags);
    check_simulation(app, flags);
    check_launcher(flags, ranks->count() > 0);
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
    return 0;
  } catch (const CLI::ParseError& error) {
    std::cerr << "train_gpt: " << error.what() << " (train_gpt --help lists the flags)\n";
    return kUsageError;
  } catch (const std::exception& error) {
    std::cerr << "train_gpt: " << zeropage::memory::message_of(error) << '\n';
    return kUsageError;
  }
  return std::nullopt;
}

}  // namespace train_gpt
