// The tables of the options about activations (memory/fields.h), as zero/option_fields.h.
#pragma once

#include "checkpointing/activation_offload_options.h"
#include "checkpointing/checkpoint.h"
#include "checkpointing/partitioned_checkpoints.h"
#include "checkpointing/recompute.h"
#include "memory/dtype_fields.h"

namespace zeropage::checkpointing {

inline auto words_of(std::type_identity<Compression>) {
  using memory::word;
  return std::array{word<Compression::kNone>(name(Compression::kNone)),
                    word<Compression::kBf16>(name(Compression::kBf16)),
                    word<Compression::k8Bit>(name(Compression::k8Bit))};
}

constexpr auto table_of(std::type_identity<RecomputeOptions>) {
  using memory::field, memory::kBytes;
  return std::tuple(memory::section(
      "Recompute",
      field<&RecomputeOptions::budget_bytes>(
          {.help = "The most activations; without, cheap operators are repeated whatever it takes",
           .unit = kBytes,
           .default_word = "none"}),
      field<&RecomputeOptions::least_bytes>({.help = "Smaller saved tensors stay", .unit = kBytes}),
      field<&RecomputeOptions::device>({.help = "Where activations lie"}),
      field<&RecomputeOptions::agree>(
          {.help = "Makes a decision rank 0's; zeropage::recompute() sets it",
           .default_word = "none"})));
}
static_assert(memory::tells_all_fields<RecomputeOptions>());

constexpr auto table_of(std::type_identity<ActivationOffloadOptions>) {
  using memory::field, memory::kBytes;
  return std::tuple(memory::section(
      "Offload of activations",
      field<&ActivationOffloadOptions::least_bytes>(
          {.help = "Smaller saved tensors stay", .unit = kBytes}),
      field<&ActivationOffloadOptions::staging_bytes>(
          {.help = "Most device memory on its way out, and, apart from that, fetched ahead",
           .unit = kBytes,
           .default_word = "twice the largest, at least 64 MiB"}),
      field<&ActivationOffloadOptions::compression>(
          {.help = "How copies are kept; all but none change gradients"}),
      field<&ActivationOffloadOptions::store>(
          {.help = "Where copies lie, such as a zeropage::NvmeActivations",
           .default_word = "host memory"})));
}
static_assert(memory::tells_all_fields<ActivationOffloadOptions>());

constexpr auto words_of(std::type_identity<RecomputeCheck>) {
  using memory::word;
  return std::array{word<RecomputeCheck::kNothing>("nothing"),
                    word<RecomputeCheck::kGeometry>("geometry"),
                    word<RecomputeCheck::kValues>("values")};
}

constexpr auto words_of(std::type_identity<Verify>) {
  using memory::word;
  return std::array{word<Verify::kNo>("no"), word<Verify::kEachTensor>("each")};
}

constexpr auto table_of(std::type_identity<CheckpointOptions>) {
  using memory::field;
  return std::tuple(memory::section(
      "A region that is computed again",
      field<&CheckpointOptions::name>({.help = "The region's, in errors"}),
      field<&CheckpointOptions::preserve_random_state>(
          {.help = "Repeats with the same random numbers"}),
      field<&CheckpointOptions::early_stop>(
          {.help = "A repetition ends when the last tensor is there that backward still needs"}),
      field<&CheckpointOptions::check>(
          {.help = "What is compared with the first run: nothing; sizes, dtypes and devices; or "
                   "values as well"})));
}
static_assert(memory::tells_all_fields<CheckpointOptions>());

constexpr auto table_of(std::type_identity<PartitionOptions>) {
  using memory::field, memory::kBytes;
  return std::tuple(memory::section(
      "Checkpoints cut over a group",
      field<&PartitionOptions::group>(
          {.help = "The ranks that hold the same values, and how they gather",
           .default_word = "none: must be set"}),
      field<&PartitionOptions::held_by_all>(
          {.help = "Whether every member holds the same values in a saved tensor",
           .default_word = "none: must be set"}),
      field<&PartitionOptions::least_bytes>(
          {.help = "Smaller saved tensors stay whole", .unit = kBytes}),
      field<&PartitionOptions::verify>(
          {.help = "Whether the members' equality is looked at, at each tensor that is cut"}),
      field<&PartitionOptions::onward>(
          {.help = "Where slices go, and what is not cut, such as ActivationOffload::hooks()",
           .default_word = "they stay"})));
}
static_assert(memory::tells_all_fields<PartitionOptions>());

}  // namespace zeropage::checkpointing
