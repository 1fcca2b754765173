#include "tests/scripts/script.h"

namespace zeropage::scripts {

NLOHMANN_JSON_SERIALIZE_ENUM(Kind, {{Kind::kLinear, "linear"},
                                    {Kind::kMlp, "mlp"},
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
                                    {Kind::kMasked, "masked"}})
NLOHMANN_JSON_SERIALIZE_ENUM(Does, {{Does::kBackward, "backward"},
                                    {Does::kBackwardNoSync, "backward_no_sync"},
                                    {Does::kStep, "step"},
                                    {Does::kZeroGrad, "zero_grad"},
                                    {Does::kClip, "clip"},
                                    {Does::kReadNorm, "read_norm"},
                                    {Does::kScaleGrad, "scale_grad"},
                                    {Does::kZeroOneGrad, "zero_one_grad"},
                                    {Does::kDropGrad, "drop_grad"},
                                    {Does::kSetGrad, "set_grad"},
                                    {Does::kLearningRate, "learning_rate"},
                                    {Does::kFreeze, "freeze"},
                                    {Does::kUnfreeze, "unfreeze"},
                                    {Does::kEvaluate, "evaluate"},
                                    {Does::kThrow, "throw"},
                                    {Does::kWriteGuarded, "write_guarded"},
                                    {Does::kWriteAlike, "write_alike"},
                                    {Does::kAverage, "average"},
                                    {Does::kSeeAverage, "see_average"},
                                    {Does::kResume, "resume"},
                                    {Does::kOwnLearningRate, "own_learning_rate"},
                                    {Does::kOwnWrite, "own_write"},
                                    {Does::kOwnLeftStep, "own_left_step"}})
NLOHMANN_JSON_SERIALIZE_ENUM(Kept, {{Kept::kAll, "all"},
                                    {Kept::kRegions, "regions"},
                                    {Kept::kRecompute, "recompute"}})
NLOHMANN_JSON_SERIALIZE_ENUM(Rule, {{Rule::kSgd, "sgd"},
                                    {Rule::kAdam, "adam"},
                                    {Rule::kAdamW, "adamw"},
                                    {Rule::kAdagrad, "adagrad"}})
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Unit, kind, of)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Action, does, which, value)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Setting, stage, data, tensor, shard_within, is_double,
                                   is_offloaded, kept, page_bytes)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Script, seed, units, rule, groups, optimizers, settings, actions)

std::string to_text(const Script& script) {
  return nlohmann::json(script).dump();
}

Script script_of(const std::string& text) {
  return nlohmann::json::parse(text).get<Script>();
}

}  // namespace zeropage::scripts
