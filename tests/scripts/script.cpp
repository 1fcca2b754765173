#include "tests/scripts/script.h"

#include <algorithm>
#include <map>
#include <set>

// Beside their enumerations, where the library of JSON looks for them.
namespace zeropage::memory {
NLOHMANN_JSON_SERIALIZE_ENUM(Tier, {{Tier::kDevice, "device"},
                                    {Tier::kHost, "host"},
                                    {Tier::kNvme, "nvme"}})
}  // namespace zeropage::memory

namespace zeropage {
NLOHMANN_JSON_SERIALIZE_ENUM(StepWhen, {{StepWhen::kInStep, "step"},
                                        {StepWhen::kInBackward, "backward"},
                                        {StepWhen::kOneStepLate, "late"}})
NLOHMANN_JSON_SERIALIZE_ENUM(LowPrecisionUpdate,
                             {{LowPrecisionUpdate::kMasterWeights, "whole"},
                              {LowPrecisionUpdate::kSplitMasterWeights, "split"},
                              {LowPrecisionUpdate::kStochasticRounding, "none"}})
NLOHMANN_JSON_SERIALIZE_ENUM(Reshard, {{Reshard::kAfterUse, "use"},
                                       {Reshard::kAfterBackward, "backward"},
                                       {Reshard::kAfterStep, "step"}})
NLOHMANN_JSON_SERIALIZE_ENUM(ReduceMicroSteps, {{ReduceMicroSteps::kAuto, "auto"},
                                                {ReduceMicroSteps::kEach, "each"},
                                                {ReduceMicroSteps::kOnce, "once"}})
NLOHMANN_JSON_SERIALIZE_ENUM(StateFormat, {{StateFormat::kFp32, "fp32"},
                                           {StateFormat::kBf16, "bf16"},
                                           {StateFormat::k8Bit, "int8"}})

}  // namespace zeropage

namespace zeropage::parallel {
NLOHMANN_JSON_SERIALIZE_ENUM(ScheduleKind, {{ScheduleKind::kOneForwardOneBackward, "1f1b"},
                                            {ScheduleKind::kGPipe, "gpipe"},
                                            {ScheduleKind::kInterleaved, "interleaved"},
                                            {ScheduleKind::kZeroBubble, "zero-bubble"}})
}  // namespace zeropage::parallel

namespace zeropage::scripts {

NLOHMANN_JSON_SERIALIZE_ENUM(Kind, {{Kind::kLinear, "linear"},
                                    {Kind::kMlp, "mlp"},
                                    {Kind::kWide, "wide"},
                                    {Kind::kBilinear, "bilinear"},
                                    {Kind::kEmbedding, "embedding"},
                                    {Kind::kEmbeddingBag, "embedding_bag"},
                                    {Kind::kConv1d, "conv1d"},
                                    {Kind::kConv2d, "conv2d"},
                                    {Kind::kConvTranspose1d, "conv_transpose1d"},
                                    {Kind::kBatchNorm, "batch_norm"},
                                    {Kind::kLayerNorm, "layer_norm"},
                                    {Kind::kGroupNorm, "group_norm"},
                                    {Kind::kInstanceNorm, "instance_norm"},
                                    {Kind::kPReLU, "prelu"},
                                    {Kind::kLstm, "lstm"},
                                    {Kind::kGru, "gru"},
                                    {Kind::kRnn, "rnn"},
                                    {Kind::kLstmCell, "lstm_cell"},
                                    {Kind::kAttention, "attention"},
                                    {Kind::kEncoder, "encoder"},
                                    {Kind::kShared, "shared"},
                                    {Kind::kTied, "tied"},
                                    {Kind::kFrozen, "frozen"},
                                    {Kind::kBuffer, "buffer"},
                                    {Kind::kFunction, "function"},
                                    {Kind::kView, "view"},
                                    {Kind::kInPlace, "in_place"},
                                    {Kind::kScalar, "scalar"},
                                    {Kind::kUnused, "unused"},
                                    {Kind::kEmpty, "empty"},
                                    {Kind::kDetached, "detached"},
                                    {Kind::kNoGrad, "no_grad"},
                                    {Kind::kBranch, "branch"},
                                    {Kind::kWeightNorm, "weight_norm"},
                                    {Kind::kStrided, "strided"},
                                    {Kind::kFused, "fused"},
                                    {Kind::kMasked, "masked"},
                                    {Kind::kDrawn, "drawn"},
                                    {Kind::kCausal, "causal"},
                                    {Kind::kExperts, "experts"},
                                    {Kind::kSigmoidExperts, "sigmoid_experts"},
                                    {Kind::kTightExperts, "tight_experts"},
                                    {Kind::kTouched, "touched"},
                                    {Kind::kTiled, "tiled"}})
NLOHMANN_JSON_SERIALIZE_ENUM(Does, {{Does::kBackward, "backward"},
                                    {Does::kBackwardNoSync, "backward_no_sync"},
                                    {Does::kBackwardTwice, "backward_twice"},
                                    {Does::kStep, "step"},
                                    {Does::kZeroGrad, "zero_grad"},
                                    {Does::kClip, "clip"},
                                    {Does::kReadNorm, "read_norm"},
                                    {Does::kScaleGrad, "scale_grad"},
                                    {Does::kZeroOneGrad, "zero_one_grad"},
                                    {Does::kDropGrad, "drop_grad"},
                                    {Does::kSetGrad, "set_grad"},
                                    {Does::kLearningRate, "learning_rate"},
                                    {Does::kSchedule, "schedule"},
                                    {Does::kFreeze, "freeze"},
                                    {Does::kUnfreeze, "unfreeze"},
                                    {Does::kEvaluate, "evaluate"},
                                    {Does::kThrow, "throw"},
                                    {Does::kWriteGuarded, "write_guarded"},
                                    {Does::kWriteAlike, "write_alike"},
                                    {Does::kAverage, "average"},
                                    {Does::kSeeAverage, "see_average"},
                                    {Does::kResume, "resume"},
                                    {Does::kAddGroup, "add_group"},
                                    {Does::kMicroBatches, "micro_batches"},
                                    {Does::kAbandon, "abandon"},
                                    {Does::kInfinite, "infinite"},
                                    {Does::kOwnLearningRate, "own_learning_rate"},
                                    {Does::kOwnWrite, "own_write"},
                                    {Does::kOwnLeftStep, "own_left_step"}})
NLOHMANN_JSON_SERIALIZE_ENUM(Kept, {{Kept::kAll, "all"},
                                    {Kept::kRegions, "regions"},
                                    {Kept::kRecompute, "recompute"},
                                    {Kept::kOnHost, "on_host"},
                                    {Kept::kOnNvme, "on_nvme"}})
NLOHMANN_JSON_SERIALIZE_ENUM(Values, {{Values::kDouble, "fp64"},
                                      {Values::kFloat, "fp32"},
                                      {Values::kBFloat16, "bf16"},
                                      {Values::kHalf, "fp16"}})
NLOHMANN_JSON_SERIALIZE_ENUM(Beside, {{Beside::kLibTorch, "libtorch"}, {Beside::kTwin, "twin"}})
NLOHMANN_JSON_SERIALIZE_ENUM(Rule, {{Rule::kSgd, "sgd"},
                                    {Rule::kAdam, "adam"},
                                    {Rule::kAdamW, "adamw"},
                                    {Rule::kAdagrad, "adagrad"},
                                    {Rule::kLamb, "lamb"},
                                    {Rule::kAdafactor, "adafactor"},
                                    {Rule::kMuon, "muon"}})
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Unit, kind, of)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Action, does, which, value)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(
    Setting, stage, data, tensor, context, expert, is_by_heads, pipeline, chunks, order, is_alone,
    is_deferred, shard_within, optimizer, parameters, when, kept, reduced, page_bytes, stays,
    prefetch_bytes, minimum_sharded_bytes, secondary_shard_within, offloaded_bytes,
    gradient_budget_bytes, is_by_class, saves_aside, parks, spread)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Accumulation, is_on, weighs, clip_norm, clip_value)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(Script, seed, units, rule, values, states,
                                                sends_floats, keeps_low, masters,
                                                is_world_invariant, autocasts, beside, accumulation,
                                                has_pipelines, has_context, groups, optimizers,
                                                left_out, settings, actions)

namespace {

bool is_of_another(Kind kind) {
  return kind == Kind::kShared || kind == Kind::kTied;
}

// The unit whose parameters this one has.
size_t origin_of(const Script& script, size_t unit) {
  while (is_of_another(script.units[unit].kind)) {
    unit = static_cast<size_t>(script.units[unit].of);
  }
  return unit;
}

int rank_of_unit(const Script& script, const Setting& setting, size_t unit) {
  const auto first = first_units_of(script, setting);
  int stage = 0;
  while (first[static_cast<size_t>(stage) + 1] <= static_cast<int64_t>(unit)) ++stage;
  return stage % setting.pipeline;
}

bool writes_buffers(Kind kind) {
  return kind == Kind::kBuffer || kind == Kind::kBatchNorm;
}

}  // namespace

StepWhen when_of(const Script& script) {
  for (const Setting& setting : script.settings) {
    if (setting.when != StepWhen::kInStep) return setting.when;
  }
  return StepWhen::kInStep;
}

std::vector<int64_t> first_units_of(const Script& script, const Setting& setting) {
  const int stages = setting.pipeline * setting.chunks;
  std::vector<int64_t> first;
  for (int stage = 0; stage <= stages; ++stage) {
    first.push_back(static_cast<int64_t>(script.units.size()) * stage / stages);
  }
  return first;
}

void set_stage(Setting& setting, int stage) {
  setting.stage = stage;
  if (stage == 0) setting.shard_within = 0;
  if (stage < 2) setting.gradient_budget_bytes = 0;
  if (stage == 3) return;
  const Setting by_default;
  setting.parameters = Tier::kDevice;
  setting.stays = by_default.stays;
  setting.prefetch_bytes = by_default.prefetch_bytes;
  setting.minimum_sharded_bytes = by_default.minimum_sharded_bytes;
  setting.secondary_shard_within = by_default.secondary_shard_within;
}

bool can_be_cut(const Script& script, const Setting& setting) {
  if (static_cast<int>(script.units.size()) < setting.pipeline * setting.chunks) return false;
  std::map<size_t, std::set<int>> ranks_of;  // by origin
  for (size_t unit = 0; unit < script.units.size(); ++unit) {
    ranks_of[origin_of(script, unit)].insert(rank_of_unit(script, setting, unit));
  }
  return std::all_of(ranks_of.begin(), ranks_of.end(), [&](const auto& item) {
    const auto& [unit, ranks] = item;
    if (ranks.size() == 1) return true;
    return ranks == std::set<int>{0, setting.pipeline - 1} &&
           !writes_buffers(script.units[unit].kind) &&
           script.units[unit].kind != Kind::kSigmoidExperts;
  });
}

bool has(const Script& script, Kind kind) {
  return std::any_of(script.units.begin(), script.units.end(),
                     [kind](const Unit& unit) { return unit.kind == kind; });
}

bool has_buffers(const Script& script) {
  return std::any_of(script.units.begin(), script.units.end(),
                     [](const Unit& unit) { return writes_buffers(unit.kind); });
}

bool is_experts(Kind kind) {
  return kind == Kind::kExperts || kind == Kind::kSigmoidExperts || kind == Kind::kTightExperts;
}

bool has_experts(const Script& script) {
  return std::any_of(script.units.begin(), script.units.end(),
                     [](const Unit& unit) { return is_experts(unit.kind); });
}

bool spreads_experts(const Script& script) {
  return std::any_of(script.settings.begin(), script.settings.end(),
                     [](const Setting& setting) { return setting.expert > 1; });
}

bool has_slices(const Script& script) {
  for (size_t unit = 0; unit < script.units.size(); ++unit) {
    const Kind kind = script.units[origin_of(script, unit)].kind;
    if (kind == Kind::kMlp || kind == Kind::kTiled) return true;
  }
  return false;
}

bool is_by_row(Kind kind) {
  switch (kind) {
    // Statistics, means and losses over rows.
    case Kind::kBatchNorm:
    case Kind::kNoGrad:
    case Kind::kFused:
    case Kind::kExperts:
    case Kind::kTightExperts:
    // MultiheadAttention is refused where attention runs over ranks.
    case Kind::kAttention:
    case Kind::kEncoder:
    // Each rank would draw for all rows.
    case Kind::kMasked:
    case Kind::kDrawn:
      return false;
    default:
      return true;
  }
}

bool can_share_rows(const Script& script) {
  if (script.has_pipelines || script.is_world_invariant) return false;
  return script.units.front().kind == Kind::kCausal &&
         std::all_of(script.units.begin(), script.units.end(),
                     [](const Unit& unit) { return is_by_row(unit.kind); });
}

bool has_ties(const Script& script) {
  return std::any_of(script.units.begin(), script.units.end(),
                     [](const Unit& unit) { return is_of_another(unit.kind); });
}

std::string to_text(const Script& script) {
  return nlohmann::json(script).dump();
}

Script script_of(const std::string& text) {
  return nlohmann::json::parse(text).get<Script>();
}

}  // namespace zeropage::scripts
