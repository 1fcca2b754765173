#include "zeropage/options.h"

#include "device/stream.h"
#include "zeropage/check.h"

namespace zeropage {

using memory::operator""_KiB;
using memory::operator""_MiB;

Stage stage_of(int number) {
  switch (number) {
    case 0:
      return Stage::kReplicated;
    case 1:
      return Stage::kOptimizerState;
    case 2:
      return Stage::kGradients;
    case 3:
      return Stage::kParameters;
    default:
      ZP_THROW("stage ", number, ": expected 0, 1, 2 or 3");
  }
}

std::string text_of(const Stage& stage) {
  for (const int number : {0, 1, 2, 3}) {
    if (stage == stage_of(number)) return std::to_string(number);
  }
  return c10::str("{", stage.optimizer_state ? "optimizer state," : "",
                  stage.gradients ? "gradients," : "", stage.parameters ? "parameters," : "", "}");
}

int64_t page_bytes_on(c10::Device device, const Options& options) {
  if (options.page_bytes != Options::kPageBytesOfDevice) return options.page_bytes;
  return device::has_streams(device.type()) ? 64_MiB : 16_MiB;
}

bool is_low_precision(c10::ScalarType dtype) {
  return dtype == c10::kBFloat16 || dtype == c10::kHalf;
}

c10::ScalarType reduce_dtype_of(const Options& options, c10::ScalarType parameters) {
  if (parameters != c10::kFloat && !is_low_precision(parameters)) return parameters;
  return options.reduce_dtype.value_or(options.world_invariant ? c10::kFloat : parameters);
}

c10::ScalarType accumulate_dtype_of(const Options& options, c10::ScalarType parameters) {
  if (!is_low_precision(parameters)) return parameters;
  return options.accumulate_dtype.value_or(c10::kFloat) == c10::kFloat ? c10::kFloat : parameters;
}

StateFormat state_format_of(const Options& options, int64_t parameter_numel) {
  // Biases and norms: few bytes, and the most sensitive.
  constexpr int64_t kLeastQuantisedNumel = 4096;
  const bool is_small = parameter_numel < kLeastQuantisedNumel;
  return options.optimizer_state == StateFormat::k8Bit && is_small ? StateFormat::kFp32
                                                                   : options.optimizer_state;
}

namespace {

// What only sharded parameters have a use for.
constexpr auto kAboutShardedParameters =
    std::tuple(&Options::parameter_budget_bytes, &Options::prefetch_bytes, &Options::reshard,
               &Options::minimum_sharded_bytes, &Options::secondary_shard_within);

// Whether any of these members is not at its default.
template <typename Members>
bool has_any_of(const Options& options, const Members& members) {
  const Options defaults;
  return std::apply([&](auto... each) { return ((options.*each != defaults.*each) || ...); },
                    members);
}

// Nothing is kept beside what is double, and no step but the class's updates it.
void validate_double(const Options& options) {
  const auto is_unset_or_double = [](const std::optional<c10::ScalarType>& dtype) {
    return !dtype || *dtype == c10::kDouble;
  };
  const auto require = [](bool condition, const char* option, const char* why) {
    ZP_CHECK(condition, "options.", option, ": ", why,
             ", but compute_dtype is Double; leave it out");
  };
  require(is_unset_or_double(options.reduce_dtype), "reduce_dtype",
          "gradients in double travel in double");
  require(is_unset_or_double(options.accumulate_dtype), "accumulate_dtype",
          "gradients in double are kept in double");
  require(options.low_precision_update == LowPrecisionUpdate::kMasterWeights,
          "low_precision_update", "is about bfloat16 and half");
  require(options.update_by != UpdateBy::kFused, "update_by", "the fused update is of fp32 values");
  require(options.optimizer_state == StateFormat::kFp32, "optimizer_state",
          "only the fused update keeps states in less, and it is of fp32 values");
  require(options.offload.optimizer == memory::Tier::kDevice, "offload.optimizer",
          "the step on the host is the fused one, of fp32 values");
  require(!options.world_invariant, "world_invariant", "sums in fp32");
}

void validate_precision(const Options& options) {
  const auto is_low_or_fp32 = [](const std::optional<c10::ScalarType>& dtype) {
    return !dtype || *dtype == c10::kFloat || is_low_precision(*dtype);
  };
  if (options.compute_dtype == c10::kDouble) return validate_double(options);
  ZP_CHECK(!options.compute_dtype || is_low_precision(*options.compute_dtype),
           "options.compute_dtype: expected bfloat16, half, double or unset, got ",
           *options.compute_dtype, "; unset leaves the module as it is");
  ZP_CHECK(is_low_or_fp32(options.reduce_dtype),
           "options.reduce_dtype: expected float, bfloat16, half or unset, got ",
           *options.reduce_dtype);
  ZP_CHECK(!options.accumulate_dtype || *options.accumulate_dtype == c10::kFloat ||
               !options.compute_dtype || options.accumulate_dtype == options.compute_dtype,
           "options.accumulate_dtype: expected float or compute_dtype, got ",
           *options.accumulate_dtype);
  ZP_CHECK(is_low_or_fp32(options.accumulate_dtype),
           "options.accumulate_dtype: expected float, bfloat16, half or unset, got ",
           *options.accumulate_dtype);
  ZP_CHECK(options.low_precision_update != LowPrecisionUpdate::kStochasticRounding ||
               options.compute_dtype != c10::kHalf,
           "options.low_precision_update: LowPrecisionUpdate::kStochasticRounding is for bfloat16, "
           "but compute_dtype is half; use LowPrecisionUpdate::kMasterWeights, or bfloat16");
  ZP_CHECK(options.low_precision_update != LowPrecisionUpdate::kSplitMasterWeights ||
               options.compute_dtype != c10::kHalf,
           "options.low_precision_update: LowPrecisionUpdate::kSplitMasterWeights is for bfloat16, "
           "whose bits begin fp32's, but compute_dtype is half; use "
           "LowPrecisionUpdate::kMasterWeights, or bfloat16");
  ZP_CHECK(
      !options.world_invariant || (options.reduce_dtype.value_or(c10::kFloat) == c10::kFloat &&
                                   options.accumulate_dtype.value_or(c10::kFloat) == c10::kFloat),
      "options.world_invariant: sums in fp32, since what is rounded on the way from rank to "
      "rank would show the split; leave reduce_dtype and accumulate_dtype unset");
}

void validate_offload(const Options& options) {
  using memory::Tier;
  const OffloadOptions& offload = options.offload;
  const bool optimizer = offload.optimizer != Tier::kDevice;
  ZP_CHECK(offload.parameters == Tier::kDevice || options.stage.parameters,
           "options.offload.parameters: stage ", text_of(options.stage),
           " keeps parameters whole on the device; use stage 3, on one rank too");
  ZP_CHECK(offload.parameters == Tier::kDevice || optimizer,
           "options.offload.parameters: the optimizer would bring them back for its step; set "
           "options.offload.optimizer too");
  ZP_CHECK(
      !optimizer || options.update_by != UpdateBy::kClass,
      "options.offload.optimizer: the step on the host is the fused one, but options.update_by is "
      "UpdateBy::kClass; use UpdateBy::kAuto, or keep the optimizer on the device");
  ZP_CHECK(!optimizer || options.low_precision_update == LowPrecisionUpdate::kMasterWeights,
           "options.offload.optimizer: the step on the host updates fp32 values; set "
           "options.low_precision_update to LowPrecisionUpdate::kMasterWeights, or keep the "
           "optimizer on the device");
  ZP_CHECK(optimizer || offload.step == StepWhen::kInStep,
           "options.offload.step: is about offloaded optimizer state; set "
           "options.offload.optimizer, or leave it StepWhen::kInStep");
  ZP_CHECK(offload.optimizer_bytes >= 0,
           "options.offload.optimizer_bytes: expected 0 or more, got ", offload.optimizer_bytes);
  ZP_CHECK(offload.parameters == Tier::kDevice || offload.optimizer_bytes == OffloadOptions::kAll,
           "options.offload.optimizer_bytes: offloaded parameters are updated where they are, so "
           "their whole optimizer leaves; leave it unset");
  ZP_CHECK(offload.worker_threads >= 0,
           "options.offload.worker_threads: expected 0 (one a core) or "
           "more, got ",
           offload.worker_threads);
  const bool nvme = offload.optimizer == Tier::kNvme || offload.parameters == Tier::kNvme;
  ZP_CHECK(nvme == !offload.nvme_directory.empty(), "options.offload.nvme_directory: ",
           nvme ? "expected a folder on a local disk for what is offloaded to Tier::kNvme"
                : "nothing is offloaded to Tier::kNvme; leave it out");
  ZP_CHECK(offload.parameters == Tier::kDevice || offload.step != StepWhen::kOneStepLate,
           "options.offload.step: StepWhen::kOneStepLate updates beside the next forward and "
           "backward, which would read offloaded parameters meanwhile; leave "
           "options.offload.parameters on the device, or use another step");
  ZP_CHECK(!nvme || offload.step != StepWhen::kOneStepLate,
           "options.offload.step: StepWhen::kOneStepLate keeps the values it will send up, and on "
           "Tier::kNvme they are not kept; use Tier::kHost, or another step");
  ZP_CHECK(
      offload.optimizer_bytes == OffloadOptions::kAll || offload.step != StepWhen::kOneStepLate,
      "options.offload.step: with StepWhen::kOneStepLate what stays on the device within "
      "options.offload.optimizer_bytes would be a step ahead of what leaves it, so results "
      "would depend on that number; leave optimizer_bytes out, or use another step");
}

void validate_limits(const Options& options) {
  using memory::format_bytes;
  const auto check_not_negative = [](const char* option, int64_t bytes) {
    ZP_CHECK(bytes >= 0, "options.", option, ": expected 0 (no limit) or more, got ", bytes);
  };
  check_not_negative("device_memory_bytes", options.device_memory_bytes);
  check_not_negative("host_memory_bytes", options.host_memory_bytes);
  const auto check_below = [](const char* option, int64_t bytes, const char* limit,
                              int64_t limit_bytes) {
    ZP_CHECK(limit_bytes == Options::kNoLimit || bytes <= limit_bytes, "options.", option, ": ",
             format_bytes(bytes), " cannot be used, as options.", limit, " is ",
             format_bytes(limit_bytes), "; lower the first or raise the second");
  };
  check_below("page_bytes", options.page_bytes, "device_memory_bytes", options.device_memory_bytes);
  check_below("parameter_budget_bytes", options.parameter_budget_bytes, "device_memory_bytes",
              options.device_memory_bytes);
  if (options.offload.optimizer == memory::Tier::kHost &&
      options.offload.optimizer_bytes != OffloadOptions::kAll) {
    check_below("offload.optimizer_bytes", options.offload.optimizer_bytes, "host_memory_bytes",
                options.host_memory_bytes);
  }
}

}  // namespace

Options without_sharded_parameters(Options options) {
  const Options defaults;
  std::apply([&](auto... members) { ((options.*members = defaults.*members), ...); },
             kAboutShardedParameters);
  return options;
}

void validate(const Options& options) {
  validate_precision(options);
  validate_offload(options);
  validate_limits(options);
  ZP_CHECK(options.compare_replicas >= 0,
           "options.compare_replicas: expected a number of steps, or 0 (never), got ",
           options.compare_replicas);
  ZP_CHECK(options.optimizer_state == StateFormat::kFp32 || options.update_by != UpdateBy::kClass,
           "options.optimizer_state: only the fused update keeps states in less than fp32, but "
           "update_by is UpdateBy::kClass; use UpdateBy::kAuto or UpdateBy::kFused");
  ZP_CHECK(options.low_precision_update != LowPrecisionUpdate::kSplitMasterWeights ||
               options.update_by != UpdateBy::kClass,
           "options.low_precision_update: only the fused update reads "
           "LowPrecisionUpdate::kSplitMasterWeights, but update_by is UpdateBy::kClass; use "
           "UpdateBy::kAuto or UpdateBy::kFused, or LowPrecisionUpdate::kMasterWeights");
  ZP_CHECK(
      options.stage.optimizer_state || !(options.stage.gradients || options.stage.parameters),
      "options.stage: ", text_of(options.stage),
      " leaves the optimizer state whole, but a rank that has a shard of a gradient or parameter "
      "can only update that; set optimizer_state too");
  ZP_CHECK(options.shard_within == Options::kAllRanks || options.shard_within >= 2,
           "options.shard_within: expected 2 ranks or more, or Options::kAllRanks, got ",
           options.shard_within, "; stage 0 has a whole replica on each rank");
  ZP_CHECK(options.shard_within == Options::kAllRanks || options.stage.optimizer_state,
           "options.shard_within: stage ", text_of(options.stage),
           " shards nothing; use stage 1, 2 or 3, or leave it out");
  if (options.secondary_shard_within != Options::kNoSecondaryShards) {
    ZP_CHECK(options.secondary_shard_within >= 2,
             "options.secondary_shard_within: expected 2 ranks or more, or "
             "Options::kNoSecondaryShards, got ",
             options.secondary_shard_within);
    ZP_CHECK(options.stage.parameters, "options.secondary_shard_within: stage ",
             text_of(options.stage), " gathers no parameters; use stage 3, or leave it out");
    ZP_CHECK(options.reshard == Reshard::kAfterUse,
             "options.secondary_shard_within: backward gathers no page again where reshard keeps "
             "it from forward on; leave reshard at Reshard::kAfterUse, or leave this out");
    ZP_CHECK(options.shard_within == Options::kAllRanks,
             "options.secondary_shard_within: with shard_within ", options.shard_within,
             " parameters are gathered within a group already; leave one of them out");
    ZP_CHECK(options.offload.parameters == memory::Tier::kDevice,
             "options.secondary_shard_within: secondary shards lie on the device, but "
             "offload.parameters takes the shards away from it; leave one of them out");
  }
  ZP_CHECK(options.page_bytes == Options::kPageBytesOfDevice || options.page_bytes >= 4_KiB,
           "options.page_bytes: expected at least 4 KiB, got ", options.page_bytes,
           " bytes; smaller pages are all messages");
  ZP_CHECK(options.parameter_budget_bytes >= 0,
           "options.parameter_budget_bytes: expected 0 (unset) or more, got ",
           options.parameter_budget_bytes);
  ZP_CHECK(options.prefetch_bytes >= 0 || options.prefetch_bytes == Options::kTwoLargestPages,
           "options.prefetch_bytes: expected 0 or more, or Options::kTwoLargestPages, got ",
           options.prefetch_bytes);
  ZP_CHECK(options.minimum_sharded_bytes >= 0,
           "options.minimum_sharded_bytes: expected 0 or more, got ",
           options.minimum_sharded_bytes);
  ZP_CHECK(options.stage.parameters || !has_any_of(options, kAboutShardedParameters),
           "options.parameter_budget_bytes, prefetch_bytes, reshard, minimum_sharded_bytes "
           "and secondary_shard_within are about sharded parameters, and stage ",
           text_of(options.stage), " keeps parameters whole; use stage 3 or leave them out");
}

}  // namespace zeropage
