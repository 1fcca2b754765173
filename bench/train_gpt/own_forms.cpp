#include "bench/train_gpt/own_forms.h"

#include <cmath>
#include <cstdlib>

#include <CLI/CLI.hpp>

#include "bench/train_gpt/field_flags.h"
#include "bench/train_gpt/flags.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"

namespace train_gpt {

// The help is what follows the library's.
constexpr auto table_of(std::type_identity<OwnForms>) {
  using zeropage::memory::field;
  return std::tuple(zeropage::memory::section(
      "Own forms",
      field<&OwnForms::reduce_dtype>(
          {.help = "; auto: the compute dtype, with --world-invariant fp32",
           .words = "auto,compute,fp32",
           .flag = {"reduce-dtype", "{}="}}),
      field<&OwnForms::accumulate_dtype>({.help = "; auto: fp32 with --accumulate above 1",
                                          .words = "auto,compute,fp32",
                                          .flag = {"accumulate-dtype", "{}="}}),
      field<&OwnForms::keep_fp32>({.help = ", such as '*norm'; on cuda norms refuse mixed dtypes",
                                   .flag = {"keep-fp32", "PATTERN"}}),
      field<&OwnForms::loss_scale>(
          {.help = "; auto: 1, for fp16 dynamic from 65536", .flag = {"loss-scale", "{auto,X}="}}),
      field<&OwnForms::spike_z>({.help = "; 0: none", .flag = {"spike-z", "Z"}}),
      field<&OwnForms::prefetch>({.words = "on,off", .flag = {"prefetch", "{}="}}),
      field<&OwnForms::device_memory>(
          {.help = "; unset: no limit", .flag = {"device-memory", "SIZE"}}),
      field<&OwnForms::host_memory>({.help = "; unset: no limit", .flag = {"host-memory", "SIZE"}}),
      field<&OwnForms::offload_optimizer>(
          {.words = "none,host,nvme:DIR", .flag = {"offload-optimizer", "{}="}}),
      field<&OwnForms::offload_parameters>(
          {.words = "none,host,nvme:DIR", .flag = {"offload-parameters", "{}="}})));
}
static_assert(zeropage::memory::tells_all_fields<OwnForms>());

namespace {

using zeropage::memory::FieldText;
using zeropage::memory::Tier;

template <typename Use>
bool use_own_form(const FieldText& field, const Use& use) {
  bool found = false;
  zeropage::memory::for_each_field<OwnForms>([&](const auto& form) {
    if (form.text.flag.name != field.flag.name) return;
    use(form);
    found = true;
  });
  return found;
}

void require(bool condition, const std::string& message) {
  if (!condition) throw CLI::ValidationError(message);
}

constexpr std::string_view kNvmePrefix = "nvme:";

std::string folder_of(const std::string& value) {
  return value.starts_with(kNvmePrefix) ? value.substr(kNvmePrefix.size()) : "";
}

Tier tier_of(const std::string& value) {
  if (value == "none") return Tier::kDevice;
  return value == "host" ? Tier::kHost : Tier::kNvme;
}

// Bytes of a text such as "80GiB"; 0 for "".
int64_t memory_size(const std::string& flag, const std::string& text) {
  if (text.empty()) return zeropage::Options::kNoLimit;
  try {
    const int64_t bytes = zeropage::memory::parse_bytes(text);
    require(bytes > 0, flag + " " + text + ": expected a size above 0");
    return bytes;
  } catch (const c10::Error& error) {
    throw CLI::ValidationError(flag + " " + text + ": " + zeropage::memory::message_of(error));
  }
}

// What there is in fp32 alone.
void check_double(const Flags& flags) {
  const OwnForms& forms = flags.forms;
  const auto require_without = [](bool condition, const std::string& flag, const char* why) {
    require(condition, flag + ": " + why + "; leave it or --compute-dtype fp64 out");
  };
  require_without(forms.reduce_dtype != "fp32", "--reduce-dtype fp32",
                  "gradients in fp64 travel in fp64");
  require_without(forms.accumulate_dtype != "fp32", "--accumulate-dtype fp32",
                  "gradients in fp64 are kept in fp64");
  require_without(!flags.options.world_invariant, "--world-invariant", "sums in fp32");
  require_without(flags.options.optimizer_state == zeropage::StateFormat::kFp32,
                  "--optimizer-state", "the update of fp64 values is the class's, with its states");
  require_without(forms.offload_optimizer == "none",
                  "--offload-optimizer " + forms.offload_optimizer,
                  "the step on the host is of fp32 values");
}

void check_precision(const Flags& flags) {
  using zeropage::LowPrecisionUpdate;
  const OwnForms& forms = flags.forms;
  const bool low = zeropage::is_low_precision(flags.dtype());
  const bool is_half = flags.dtype() == torch::kHalf;
  const LowPrecisionUpdate update = flags.options.low_precision_update;
  const bool world_invariant = flags.options.world_invariant;
  const std::string of_low =
      " is about parameters in a lower precision; use --compute-dtype bf16 or fp16, or leave it "
      "out";
  require(low || forms.accumulate_dtype != "compute", "--accumulate-dtype compute" + of_low);
  require(low || update == LowPrecisionUpdate::kMasterWeights, "--low-precision-update" + of_low);
  require(low || forms.keep_fp32.empty(), "--keep-fp32" + of_low);
  require(!is_half || update != LowPrecisionUpdate::kStochasticRounding,
          "--low-precision-update stochastic: is for bf16; use master");
  require(!is_half || update != LowPrecisionUpdate::kSplitMasterWeights,
          "--low-precision-update split: is for bf16; use master");
  require(flags.options.optimizer_state == zeropage::StateFormat::kFp32 || flags.optimizer != "sgd",
          "--optimizer-state: plain SGD keeps no state; leave it out or use another --optimizer");
  require(!world_invariant || forms.reduce_dtype != "compute" || !low,
          "--world-invariant: sums in fp32; leave --reduce-dtype out");
  require(!world_invariant || forms.accumulate_dtype != "compute",
          "--world-invariant: sums in fp32; leave --accumulate-dtype out");
  if (flags.dtype() == torch::kFloat64) check_double(flags);
}

void check_accumulation(const Flags& flags) {
  const auto& clip_norm = flags.accumulator.clip_norm;
  require(!clip_norm || (std::isfinite(*clip_norm) && *clip_norm > 0),
          c10::str("--clip-norm ", clip_norm.value_or(0), ": expected a finite number > 0"));
  const double spike_z = flags.forms.spike_z;
  require(std::isfinite(spike_z) && spike_z >= 0,
          c10::str("--spike-z ", spike_z, ": expected standard deviations > 0, such as 6"));
  require(!flags.options.world_invariant ||
              flags.accumulator.reduce != zeropage::ReduceMicroSteps::kOnce,
          "--world-invariant: adds up the ranks at each micro-step; use --reduce-micro-steps each "
          "or auto");
  const std::string& loss_scale = flags.forms.loss_scale;
  if (loss_scale == "auto") return;
  char* end = nullptr;
  const double scale = std::strtod(loss_scale.c_str(), &end);
  int exponent = 0;
  require(*end == '\0' && scale > 0 && std::isfinite(scale) && std::frexp(scale, &exponent) == 0.5,
          "--loss-scale " + loss_scale + ": expected auto or a power of two");
}

void check_offload(const Flags& flags) {
  const std::string& optimizer = flags.forms.offload_optimizer;
  const std::string& parameters = flags.forms.offload_parameters;
  const zeropage::OffloadOptions& offload = flags.options.offload;
  require(parameters == "none" || zeropage::zero::shards_parameters(flags.options),
          "--offload-parameters " + parameters + ": stage " + text_of(flags.options.stage) +
              " keeps parameters whole on the device; use --stage 3, on one rank too");
  require(parameters == "none" || optimizer != "none",
          "--offload-parameters " + parameters +
              ": the optimizer would bring them back for its step; use --offload-optimizer too");
  require(parameters == "none" || offload.step != zeropage::StepWhen::kOneStepLate,
          "--offload-step late: updates beside the next forward, which would read offloaded "
          "parameters meanwhile; leave --offload-parameters out, or use another step");
  require(folder_of(optimizer).empty() || folder_of(parameters).empty() || optimizer == parameters,
          "--offload-parameters " + parameters + ": expected the folder of --offload-optimizer, " +
              optimizer);
  const bool has_details = offload.step != zeropage::StepWhen::kInStep ||
                           offload.optimizer_bytes != zeropage::OffloadOptions::kAll ||
                           offload.worker_threads > 0 || offload.link_bytes_per_second > 0;
  require(flags.forms.offloads() || !has_details || flags.has_limits(),
          "--offload-step, --offload-bytes, --offload-threads and --link-speed are about what is "
          "offloaded; use --offload-optimizer, or leave them out");
}

}  // namespace

bool add_own_form(CLI::App& app, const FieldText& field, OwnForms& forms) {
  return use_own_form(field, [&](const auto& form) {
    add_flag(app, form, c10::str(field.help, form.text.help), forms);
  });
}

bool write_own_form(const FieldText& field, const OwnForms& forms, nlohmann::json& json) {
  return use_own_form(field, [&](const auto& form) {
    json[std::string(field.flag.name)] = flag_json(form, forms);
  });
}

void check_own_forms(const Flags& flags) {
  memory_size("--device-memory", flags.forms.device_memory);
  memory_size("--host-memory", flags.forms.host_memory);
  check_accumulation(flags);
  check_precision(flags);
  check_offload(flags);
}

void apply_own_forms(Flags& flags) {
  const OwnForms& forms = flags.forms;
  zeropage::Options& options = flags.options;
  options.rounding_seed = flags.seed;
  options.device_memory_bytes = memory_size("--device-memory", forms.device_memory);
  options.host_memory_bytes = memory_size("--host-memory", forms.host_memory);
  if (!forms.prefetch) options.prefetch_bytes = 0;
  if (zeropage::is_low_precision(flags.dtype())) {
    const auto dtype_of = [&](const std::string& form, bool auto_is_fp32) {
      const bool is_fp32 = form == "fp32" || (form == "auto" && auto_is_fp32);
      return is_fp32 ? torch::kFloat32 : *options.compute_dtype;
    };
    const bool sums_up = flags.accumulator.micro_steps > 1 || options.world_invariant;
    options.reduce_dtype = dtype_of(forms.reduce_dtype, options.world_invariant);
    options.accumulate_dtype = dtype_of(forms.accumulate_dtype, sums_up);
    if (!forms.keep_fp32.empty()) {
      options.stays_fp32 = zeropage::ModuleSelection::named({forms.keep_fp32});
    }
  }
  options.offload.optimizer = tier_of(forms.offload_optimizer);
  options.offload.parameters = tier_of(forms.offload_parameters);
  options.offload.nvme_directory = folder_of(forms.offload_optimizer);
  if (options.offload.nvme_directory.empty()) {
    options.offload.nvme_directory = folder_of(forms.offload_parameters);
  }
  if (forms.spike_z > 0) flags.accumulator.norm_spikes.emplace().z_score = forms.spike_z;
  if (forms.loss_scale != "auto") {
    flags.accumulator.loss_scaler =
        zeropage::accumulate::LossScalerOptions::fixed(std::stod(forms.loss_scale));
  }
}

}  // namespace train_gpt
