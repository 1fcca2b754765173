// The tables of the options about activations (zeropage/fields.h), as zeropage/option_fields.h.
#pragma once

#include "zeropage/activation_offload.h"
#include "zeropage/checkpoint.h"
#include "zeropage/detail/dtype_fields.h"
#include "zeropage/recompute.h"

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
          {.help = "Most bytes of activations; none: only cheap operators are computed again",
           .unit = kBytes,
           .default_word = "none"}),
      field<&RecomputeOptions::blocks>(
          {.help = "Blocks of which the input alone stays; find_blocks() gives them",
           .default_word = "none"}),
      field<&RecomputeOptions::keeps_all>({.help = "Nothing is computed again"}),
      field<&RecomputeOptions::least_bytes>(
          {.help = "Saved tensors below this size stay", .unit = kBytes}),
      field<&RecomputeOptions::device>({.help = "Device of the activations"}),
      field<&RecomputeOptions::agree>(
          {.help = "Function that makes a decision rank 0's; zeropage::recompute() sets it",
           .default_word = "none"})));
}
static_assert(memory::tells_all_fields<RecomputeOptions>());

constexpr auto table_of(std::type_identity<ActivationOffloadOptions>) {
  using memory::field, memory::kBytes;
  return std::tuple(memory::section(
      "Offload of activations",
      field<&ActivationOffloadOptions::least_bytes>(
          {.help = "Saved tensors below this size stay", .unit = kBytes}),
      field<&ActivationOffloadOptions::staging_bytes>(
          {.help = "Most device memory on its way out, and as much again fetched ahead",
           .unit = kBytes,
           .default_word = "twice the largest, at least 64 MiB"}),
      field<&ActivationOffloadOptions::compression>(
          {.help = "Format of the copies; all but none change gradients"}),
      field<&ActivationOffloadOptions::store>(
          {.help = "Where copies are kept, such as a zeropage::NvmeActivations",
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
      field<&CheckpointOptions::name>({.help = "Name of the region in errors"}),
      field<&CheckpointOptions::preserve_random_state>(
          {.help = "Repeat with the same random numbers"}),
      field<&CheckpointOptions::early_stop>(
          {.help = "End a repetition with the last tensor that backward still needs"}),
      field<&CheckpointOptions::check>({.help = "What is compared with the first run: nothing; "
                                                "sizes, dtypes and devices; or values too"})));
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
          {.help =
               "Function that says whether every member holds the same values in a saved tensor",
           .default_word = "none: must be set"}),
      field<&PartitionOptions::least_bytes>(
          {.help = "Saved tensors below this size stay whole", .unit = kBytes}),
      field<&PartitionOptions::verify>(
          {.help = "Check at each tensor that is cut that the members hold the same values"}),
      field<&PartitionOptions::onward>({.help = "Hooks that slices and uncut tensors are passed "
                                                "to, such as ActivationOffload::hooks()",
                                        .default_word = "they stay"})));
}
static_assert(memory::tells_all_fields<PartitionOptions>());

}  // namespace zeropage::checkpointing
