// A training script as a value: the module that it trains, what it does with it, and how it is run. A seed
// makes one (random_script.h), each side interprets it (plain_side.h, our_side.h), and as text it is kept.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "zeropage/accumulator.h"
#include "zeropage/options.h"
#include "zeropage/schedule.h"

namespace zeropage::scripts {

using memory::Tier;
using parallel::ScheduleKind;

// A part of the module, [batch, 16] -> [batch, 16]; composed_module.cpp says what each computes.
enum class Kind : uint8_t {
  kLinear,
  kMlp,
  kWide,
  kBilinear,
  kEmbedding,
  kEmbeddingBag,
  kConv1d,
  kConv2d,
  kConvTranspose1d,
  kBatchNorm,
  kLayerNorm,
  kGroupNorm,
  kInstanceNorm,
  kPReLU,
  kLstm,
  kGru,
  kRnn,
  kLstmCell,
  kAttention,
  kEncoder,
  kShared,
  kTied,
  kFrozen,
  kBuffer,
  kFunction,
  kView,
  kInPlace,
  kScalar,
  kUnused,
  kEmpty,
  kDetached,
  kNoGrad,
  kBranch,
  kWeightNorm,
  kStrided,
  kFused,
  kMasked,
  kDrawn,
  kCausal,
  kExperts,         // whose loss of balance is added behind forward
  kSigmoidExperts,  // with a bias of balance
  kTightExperts,    // of so many rows as a rank has, which may be none; some are dropped
  kTouched,         // a list, under touch_all()
  kTiled,           // as kMlp, by tiled(): on as many rows at a time as the samples say
};

struct Unit {
  Kind kind = Kind::kLinear;
  // The earlier unit that kShared and kTied are of.
  int of = 0;
};

enum class Does : uint8_t {
  kBackward,        // which: 1: of the first half of the units; value: factor of the loss
  kBackwardNoSync,  // the same under no_sync()
  kBackwardTwice,   // the same, two times over a graph that is retained
  kStep,            // of all optimizers
  kZeroGrad,        // which: 0, 1: the optimizer's, to none or zeros; 2, 3: the module's
  kClip,            // which: 0: ours, 1: torch::nn::utils'; value: the most
  kReadNorm,        // of all gradients
  kScaleGrad,       // which: parameter; value: factor
  kZeroOneGrad,     // which: parameter
  kDropGrad,        // which: parameter
  kSetGrad,         // which: parameter; value: of all its elements
  kLearningRate,    // which: group; value: factor
  kSchedule,        // which: 0: StepLR of LibTorch, 1: ReduceLROnPlateau, which is told the value
  kFreeze,          // which: parameter
  kUnfreeze,        // which: parameter
  kEvaluate,
  kThrow,         // in forward, behind unit `which`
  kWriteGuarded,  // which: parameter; value: factor, on rank 0 under a guard
  kWriteAlike,    // which: parameter; value: factor, by an operator on all ranks
  kAverage,       // updates a moving average of the weights
  kSeeAverage,    // evaluates with it
  kResume,        // saves, and loads under setting `which`
  kAddGroup,      // gives the first optimizer the parameters that it was made without
  // Where the script has an accumulator, whose micro-batches kBackward gives it too.
  kMicroBatches,  // which: how many; a pipeline's step has one of these
  kAbandon,       // drops the gradients of the step that is open
  kInfinite,      // the next micro-batch's loss, of the first rank
  // What the last rank of `data` does alone. It must be refused, where there are others.
  kOwnLearningRate,  // which: group; value: factor
  kOwnWrite,         // which: parameter; value: factor
  kOwnLeftStep,      // no step
};

// Whether this library must refuse the action.
constexpr bool is_wrong(Does does) {
  return does >= Does::kOwnLearningRate;
}

struct Action {
  Does does = Does::kStep;
  int which = 0;
  double value = 1;
};

enum class Values : uint8_t { kDouble, kFloat, kBFloat16, kHalf };
enum class Kept : uint8_t { kAll, kRegions, kRecompute, kOnHost, kOnNvme };  // activations
enum class Rule : uint8_t { kSgd, kAdam, kAdamW, kAdagrad, kLamb, kMuon, kAdafactor };
constexpr bool reads_whole_tensors(Rule rule) {
  return rule == Rule::kLamb || rule == Rule::kMuon || rule == Rule::kAdafactor;
}

// What shall make no difference.
struct Setting {
  int stage = 0;
  int data = 1;     // ranks
  int tensor = 1;   // ranks that have slices of each kMlp and kTiled
  int context = 1;  // ranks that have some of the rows each, which are the tokens of kCausal
  int expert = 1;   // ranks that have some of the experts each, and samples of their own
  bool is_by_heads = false;  // its attention, over those ranks
  int pipeline = 1;          // ranks that have the units one after the other
  int chunks = 1;            // of the units, on each of them
  ScheduleKind order = ScheduleKind::kOneForwardOneBackward;
  bool is_alone = false;     // the optimizer, beside a module without a wrapper
  bool is_deferred = false;  // a pipeline's module is constructed without memory
  int shard_within = 0;
  Tier optimizer = Tier::kDevice;
  Tier parameters = Tier::kDevice;
  StepWhen when = StepWhen::kInStep;
  Kept kept = Kept::kAll;
  ReduceMicroSteps reduced = ReduceMicroSteps::kAuto;
  int64_t page_bytes = 4096;
  Reshard stays = Reshard::kAfterUse;
  int64_t prefetch_bytes = -1;        // negative: as many as by default
  int64_t minimum_sharded_bytes = 0;  // pages of fewer stay whole
  int secondary_shard_within = 0;
  int64_t offloaded_bytes = 0;        // at most so many leave the device; 0: all
  int64_t gradient_budget_bytes = 0;  // of an accumulator that reduces once where they fit
  bool is_by_class = false;           // the update
  bool saves_aside = false;           // its state, while training goes on
  bool parks = false;  // the whole module to NVMe and back, whenever gradients are zeroed
  int spread = 1;      // ranks whose micro-batches each rank runs, one after the other

  int shares() const { return data * expert; }  // ranks that have samples of their own
  int ranks() const { return pipeline * shares() * context * tensor; }
};

// How the script's steps are made of micro-batches.
struct Accumulation {
  bool is_on = false;
  bool weighs = false;    // micro-batches count differently, some not at all
  double clip_norm = 0;   // 0: none
  double clip_value = 0;  // 0: none
};

// What a run is compared with.
enum class Beside : uint8_t {
  kLibTorch,
  kTwin,  // this library's run under plainer settings that promise the same bits (twin.h)
};

struct Script {
  uint64_t seed = 0;  // of its values
  std::vector<Unit> units;
  Rule rule = Rule::kSgd;
  Values values = Values::kDouble;
  StateFormat states = StateFormat::kFp32;  // of the optimizer
  // Below fp32, gradients that travel in fp32, and that are kept in the parameters' dtype.
  bool sends_floats = false;
  bool keeps_low = false;
  LowPrecisionUpdate masters = LowPrecisionUpdate::kMasterWeights;
  bool is_world_invariant = false;
  bool autocasts = false;  // forward and loss, to bf16
  Beside beside = Beside::kLibTorch;
  Accumulation accumulation;
  bool has_pipelines = false;  // some settings may have one
  bool has_context = false;    // some settings may have such an axis
  int groups = 1;
  int optimizers = 1;
  int left_out = 0;               // parameters of the first optimizer that come to it by kAddGroup
  std::vector<Setting> settings;  // the first one is that of the beginning
  std::vector<Action> actions;
};

// When its steps are made: kInBackward where a setting does that, kOneStepLate where all do.
StepWhen when_of(const Script& script);

// The first unit of each stage of a pipeline, and where the last one ends.
std::vector<int64_t> first_units_of(const Script& script, const Setting& setting);
// Whether the first and the last rank alone share what units have in common, which none writes.
bool can_be_cut(const Script& script, const Setting& setting);
// Whether a unit writes buffers, of which an optimizer without a wrapper leaves each rank its own.
bool has_buffers(const Script& script);
// Whether there is one of that kind.
bool has(const Script& script, Kind kind);
// Whether there is one of the units that are cut over "tensor".
bool has_slices(const Script& script);
// Whether the kind is a layer of experts that can be spread over ranks.
bool is_experts(Kind kind);
bool has_experts(const Script& script);
// Whether a setting spreads them.
bool spreads_experts(const Script& script);
// Whether the unit computes each row by itself, and the first one attends to all: the rows may be over several ranks.
bool is_by_row(Kind kind);
bool can_share_rows(const Script& script);
// Whether units have parameters in common.
bool has_ties(const Script& script);

// What is about stage 3 alone is left at its defaults in others.
void set_stage(Setting& setting, int stage);

// One line of JSON, and back. Throws nlohmann::json::exception for text that is none.
std::string to_text(const Script& script);
Script script_of(const std::string& text);

}  // namespace zeropage::scripts
