#include "examples/train_gpt/offload_flags.h"

#include <string_view>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "examples/train_gpt/value_options.h"
#include "memory/check.h"

namespace train_gpt {
namespace {

using zeropage::StepWhen;
using zeropage::memory::Tier;

constexpr std::string_view kNvmePrefix = "nvme:";

std::string folder_of(const std::string& value) {
  return value.starts_with(kNvmePrefix) ? value.substr(kNvmePrefix.size()) : "";
}

Tier tier_of(const std::string& value) {
  if (value == "none") return Tier::kDevice;
  return value == "host" ? Tier::kHost : Tier::kNvme;
}

void add_tier(CLI::App& app, const char* flag, std::string& value, const char* help) {
  app.add_option(flag, value, help)
      ->option_text("{none,host,nvme:DIR}=none")
      ->check([](const std::string& given) -> std::string {
        if (given == "none" || given == "host" || !folder_of(given).empty()) return "";
        return given + ": expected none, host or nvme:DIR";
      });
}

}  // namespace

zeropage::OffloadOptions OffloadFlags::options() const {
  zeropage::OffloadOptions offload;
  offload.optimizer = tier_of(optimizer);
  offload.parameters = tier_of(parameters);
  if (bytes > 0) offload.optimizer_bytes = bytes;
  if (step == "backward") offload.step = StepWhen::kInBackward;
  if (step == "late") offload.step = StepWhen::kOneStepLate;
  offload.nvme_directory = folder_of(optimizer) + folder_of(parameters);
  if (!folder_of(optimizer).empty()) offload.nvme_directory = folder_of(optimizer);
  offload.worker_threads = threads;
  offload.link_bytes_per_second = link_bytes_per_second;
  return offload;
}

void OffloadFlags::check(int stage) const {
  const auto require = [](bool condition, const std::string& message) {
    if (!condition) throw CLI::ValidationError(message);
  };
  require(parameters == "none" || stage == 3,
          "--offload-parameters " + parameters + ": stage " + std::to_string(stage) +
              " keeps parameters whole on the device; use --stage 3, on one rank too");
  require(parameters == "none" || optimizer != "none",
          "--offload-parameters " + parameters +
              ": the optimizer would bring them back for its step; use --offload-optimizer too");
  require(parameters == "none" || step != "late",
          "--offload-step late: updates beside the next forward, which would read offloaded "
          "parameters meanwhile; leave --offload-parameters out, or use another step");
  require(folder_of(optimizer).empty() || folder_of(parameters).empty() || optimizer == parameters,
          "--offload-parameters " + parameters + ": expected the folder of --offload-optimizer, " +
              optimizer);
  const bool has_details = step != "step" || bytes > 0 || threads > 0 || link_bytes_per_second > 0;
  require(any() || !has_details,
          "--offload-step, --offload-bytes, --offload-threads and --link-speed are about what is "
          "offloaded; use --offload-optimizer, or leave them out");
}

void add_offload(CLI::App& app, OffloadFlags& flags) {
  add_tier(app, "--offload-optimizer", flags.optimizer,
           "Where the optimizer's states and fp32 values are, and its step is made");
  add_tier(app, "--offload-parameters", flags.parameters,
           "Where sharded parameters are between their uses (stage 3)");
  app.add_option("--offload-step", flags.step,
                 "When the step on offloaded state is made: in step(); as gradients come, in the "
                 "middle of backward; or one step late, beside the next one (other results)")
      ->check(CLI::IsMember({"step", "backward", "late"}))
      ->capture_default_str();
  add_bytes(app, "--offload-bytes", flags.bytes, 1,
            "The most of values, states and gradients that leaves a rank (unset: all)");
  app.add_option("--offload-threads", flags.threads,
                 "Threads of that step, beside --threads (0: the rank's cores)")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  add_bytes(
      app, "--link-speed", flags.link_bytes_per_second, 1,
      "Bytes a second of a link that copies are slowed down to, in each direction, to measure "
      "on a host (unset: not)");
}

void write_offload(const OffloadFlags& flags, nlohmann::json& json) {
  json["offload-optimizer"] = flags.optimizer;
  json["offload-parameters"] = flags.parameters;
  json["offload-step"] = flags.step;
  json["offload-bytes"] = flags.bytes;
  json["offload-threads"] = flags.threads;
  json["link-speed"] = flags.link_bytes_per_second;
}

}  // namespace train_gpt
