// A training script as a value: the module that it trains, what it does with it, and how it is run. A seed
// makes one (random_script.h), each side interprets it (plain_side.h, our_side.h), and as text it is kept.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace zeropage::scripts {

// A part of the module, [batch, 16] -> [batch, 16]; composed_module.cpp says what each computes.
enum class Kind : uint8_t {
  kLinear,
  kMlp,
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
  kMasked,
};

struct Unit {
  Kind kind = Kind::kLinear;
  // The earlier unit that kShared and kTied are of.
  int of = 0;
};

enum class Does : uint8_t {
  kBackward,        // which: 1: of the first half of the units; value: factor of the loss
  kBackwardNoSync,  // the same under no_sync()
  kStep,            // of all optimizers
  kZeroGrad,        // which: 0, 1: the optimizer's, to none or zeros; 2, 3: the module's
  kClip,            // which: 0: ours, 1: torch::nn::utils'; value: the most
  kReadNorm,        // of all gradients
  kScaleGrad,       // which: parameter; value: factor
  kZeroOneGrad,     // which: parameter
  kDropGrad,        // which: parameter
  kSetGrad,         // which: parameter; value: of all its elements
  kLearningRate,    // which: group; value: factor
  kFreeze,          // which: parameter
  kUnfreeze,        // which: parameter
  kEvaluate,
  kThrow,         // in forward, behind unit `which`
  kWriteGuarded,  // which: parameter; value: factor, on rank 0 under a guard
  kWriteAlike,    // which: parameter; value: factor, by an operator on all ranks
  kAverage,       // updates a moving average of the weights
  kSeeAverage,    // evaluates with it
  kResume,        // saves, and loads under setting `which`
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

enum class Kept : uint8_t { kAll, kRegions, kRecompute };  // activations
enum class Rule : uint8_t { kSgd, kAdam, kAdamW, kAdagrad };

// What shall make no difference.
struct Setting {
  int stage = 0;
  int data = 1;    // ranks
  int tensor = 1;  // ranks that have slices of each kMlp
  int shard_within = 0;
  bool is_double = true;
  bool is_offloaded = false;  // the optimizer's state, to the host
  Kept kept = Kept::kAll;
  int64_t page_bytes = 4096;

  int ranks() const { return data * tensor; }
};

struct Script {
  uint64_t seed = 0;  // of its values
  std::vector<Unit> units;
  Rule rule = Rule::kSgd;
  int groups = 1;
  int optimizers = 1;
  std::vector<Setting> settings;  // the first one is that of the beginning
  std::vector<Action> actions;
};

// One line of JSON, and back. Throws nlohmann::json::exception for text that is none.
std::string to_text(const Script& script);
Script script_of(const std::string& text);

}  // namespace zeropage::scripts
