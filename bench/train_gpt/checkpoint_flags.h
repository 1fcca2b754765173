// --checkpoint-activations, --tiled-mlp and --offload-activations: what is kept of activations until backward.
#pragma once

#include <cstdint>
#include <string>

#include "examples/byte_gpt/gpt.h"
#include "zeropage/checkpoint.h"

namespace train_gpt {

struct CheckpointFlags {
  enum class Policy : uint8_t {
    kBlocks,     // `every` so many blocks are a region; none() keeps all
    kSelective,  // operators that are cheap to repeat are repeated
    kBudget,     // as much is repeated as `budget_bytes` demands
  };
  enum class Offload : uint8_t { kNone, kHost, kFolder };

  std::string text = "none";  // as it was given
  Policy policy = Policy::kBlocks;
  zeropage::checkpointing::EveryBlocks every = zeropage::checkpointing::EveryBlocks::none();
  int64_t budget_bytes = 0;

  bool tiles_mlps = false;  // MLPs run on some tokens at a time, which backward computes again

  std::string offload_text = "none";
  Offload offload = Offload::kNone;
  std::string offload_folder;

  bool keeps_all() const { return text == "none" && offload == Offload::kNone && !tiles_mlps; }
  // More than regions is asked for, which work on tensors without values too.
  bool sees_values() const { return policy == Policy::kBudget || offload != Offload::kNone; }

  // {none,blocks,every:K,every:sqrt,selective,budget:BYTES}. Throws with words.
  void parse_policy(const std::string& value);
  // {none,host,nvme:DIR}. Throws with words.
  void parse_offload(const std::string& value);
  // Throws where the model has too few layers for it, and where one flag excludes the other.
  void check(int64_t layers) const;
};

// How a model runs its blocks, so that regions are repeated as the flags say; empty: plainly.
BlockLoop block_loop(const CheckpointFlags& flags);

}  // namespace train_gpt
