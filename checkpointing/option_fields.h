// The tables of the options about activations (memory/fields.h), as zero/option_fields.h.
#pragma once

#include "checkpointing/activation_offload_options.h"
#include "checkpointing/recompute.h"
#include "memory/fields.h"

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

}  // namespace zeropage::checkpointing
