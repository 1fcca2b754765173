// The tables of Options and OffloadOptions (zeropage/fields.h): the words for their values, and one line on each field. The flags are
// train_gpt's. The headers' comments explain at length what is one line here.
#pragma once

#include "zeropage/detail/dtype_fields.h"
#include "zeropage/options.h"

namespace zeropage {

constexpr auto words_of(std::type_identity<UpdateBy>) {
  using memory::word;
  return std::array{word<UpdateBy::kAuto>("auto"), word<UpdateBy::kClass>("class"),
                    word<UpdateBy::kFused>("fused")};
}

constexpr auto words_of(std::type_identity<LowPrecisionUpdate>) {
  using memory::word;
  return std::array{word<LowPrecisionUpdate::kMasterWeights>("master"),
                    word<LowPrecisionUpdate::kSplitMasterWeights>("split"),
                    word<LowPrecisionUpdate::kStochasticRounding>("stochastic"),
                    word<LowPrecisionUpdate::kNearest>("nearest")};
}

constexpr auto words_of(std::type_identity<Reshard>) {
  using memory::word;
  return std::array{word<Reshard::kAfterUse>("use"), word<Reshard::kAfterBackward>("backward"),
                    word<Reshard::kAfterStep>("step")};
}

constexpr auto words_of(std::type_identity<StepWhen>) {
  using memory::word;
  return std::array{word<StepWhen::kInStep>("step"), word<StepWhen::kInBackward>("backward"),
                    word<StepWhen::kOneStepLate>("late")};
}

constexpr auto words_of(std::type_identity<StateFormat>) {
  using memory::word;
  return std::array{word<StateFormat::kFp32>("fp32"), word<StateFormat::kBf16>("bf16"),
                    word<StateFormat::k8Bit>("8bit")};
}

namespace memory {

inline auto words_of(std::type_identity<Tier>) {
  return std::array{word<Tier::kDevice>(name(Tier::kDevice)), word<Tier::kHost>(name(Tier::kHost)),
                    word<Tier::kNvme>(name(Tier::kNvme))};
}

}  // namespace memory

constexpr auto table_of(std::type_identity<OffloadOptions>) {
  using memory::Bounds, memory::Compared, memory::field, memory::kBytes;
  return std::tuple(memory::section(
      "Offload",
      field<&OffloadOptions::optimizer>(
          {.help = "Where the optimizer's states and fp32 values are, and where its step runs",
           .flag = {"offload-optimizer"}}),
      field<&OffloadOptions::parameters>(
          {.help = "Where sharded parameters are between their uses (stage 3)",
           .flag = {"offload-parameters"}}),
      field<&OffloadOptions::step>({.help = "When the offloaded step runs: in step(), in backward, "
                                            "or one step late (other results)",
                                    .flag = {"offload-step"}}),
      field<&OffloadOptions::optimizer_bytes>(
          {.help = "Most bytes of values, states and gradients that leave a rank",
           .unit = kBytes,
           .default_word = "all",
           .flag = {"offload-bytes"},
           .bounds = Bounds::at_least(1)}),
      field<&OffloadOptions::worker_threads>(
          {.help = "Threads of the offloaded step, beside LibTorch's; 0: the rank's cores",
           .flag = {"offload-threads"},
           .bounds = Bounds::range(0, 4096),
           .compared = Compared::kNo}),
      field<&OffloadOptions::link_bytes_per_second>(
          {.help = "Bytes a second to slow copies down to, in each direction, to measure on a host",
           .unit = kBytes,
           .default_word = "unset",
           .flag = {"link-speed"},
           .bounds = Bounds::at_least(1),
           .compared = Compared::kNo}),
      field<&OffloadOptions::nvme_directory>(
          {.help = "Folder on a local disk for what is offloaded to NVMe",
           .compared = Compared::kNo})));
}
static_assert(memory::tells_all_fields<OffloadOptions>());

constexpr auto table_of(std::type_identity<Options>) {
  using memory::Bounds, memory::Compared, memory::field, memory::kBytes, memory::section;
  return std::tuple(
      section(
          "What is sharded",
          field<&Options::stage>(
              {.help = "What is sharded: 0 nothing, 1 optimizer state, 2 gradients, 3 parameters",
               .flag = {"stage"}}),
          field<&Options::shard_within>({.help = "Shard over each group of this many neighbouring "
                                                 "ranks (hybrid sharding); unset: all ranks",
                                         .default_word = "all",
                                         .flag = {"shard-within", "RANKS"},
                                         .bounds = Bounds::at_least(2)}),
          field<&Options::secondary_shard_within>(
              {.help = "Keep pages sharded a second time within this many neighbouring ranks, for "
                       "backward (stage 3)",
               .default_word = "none",
               .flag = {"secondary-shard-within", "RANKS"},
               .bounds = Bounds::at_least(2)}),
          field<&Options::page_bytes>({.help = "Size of a page, the unit of communication",
                                       .unit = kBytes,
                                       .default_word = "16MiB, on cuda 64MiB",
                                       .flag = {"page-bytes", "BYTES="},
                                       .bounds = Bounds::at_least(4096)}),
          field<&Options::parameter_budget_bytes>(
              {.help =
                   "Most bytes of whole parameters on a rank at stage 3; unset: two largest pages",
               .unit = kBytes,
               .default_word = "unset",
               .flag = {"parameter-budget", "BYTES"},
               .bounds = Bounds::at_least(1)}),
          field<&Options::prefetch_bytes>(
              {.help = "Gather parameters ahead of their use at stage 3",
               .unit = kBytes,
               .default_word = "two largest pages",
               .flag = {"prefetch"}}),
          field<&Options::reshard>({.help = "When stage 3 frees whole parameters: after their use, "
                                            "after backward, or after the step",
                                    .flag = {"reshard", "{}="}}),
          field<&Options::minimum_sharded_bytes>(
              {.help = "Stage 3 keeps the parameters of smaller pages whole on every rank",
               .unit = kBytes})),
      section(
          "What is computed",
          field<&Options::world_invariant>({.help = "The same bits for any power-of-two split of "
                                                    "micro-batches over ranks and --accumulate",
                                            .flag = {"world-invariant"}}),
          field<&Options::update_by>(
              {.help = "How the optimizer updates: by torch::optim's class, with its bits, or in "
                       "one fused pass; auto: fused where the class has such a form"}),
          field<&Options::broadcast_buffers>(
              {.help =
                   "Give all ranks rank 0's values of the buffers that a rank has written, at the "
                   "end of backward"}),
          field<&Options::compare_replicas>(
              {.help = "Compare the bits of what several ranks have, once in K steps and in each "
                       "save; 0: never",
               .flag = {"compare-replicas", "K="},
               .bounds = Bounds::not_negative()})),
      section(
          "Precision",
          field<&Options::compute_dtype>({.help = "Dtype of parameters, gradients and activations",
                                          .default_word = "as the module is",
                                          .flag = {"compute-dtype", "{}="}}),
          field<&Options::reduce_dtype>(
              {.help = "Dtype of gradients on the wire", .flag = {"reduce-dtype"}}),
          field<&Options::accumulate_dtype>(
              {.help = "Dtype in which gradients are kept and added up",
               .flag = {"accumulate-dtype"}}),
          field<&Options::low_precision_update>(
              {.help = "How bf16 and fp16 parameters are updated: with fp32 master weights, with "
                       "the 16 bits of them that bf16 lacks (split), or without, rounded "
                       "stochastically (bf16) or to nearest",
               .flag = {"low-precision-update", "{}="}}),
          field<&Options::optimizer_state>(
              {.help = "Format of the optimizer's states; 8bit: blocks of 256, fp32 for fewer than "
                       "4096 elements",
               .flag = {"optimizer-state", "{}="}}),
          field<&Options::stays_fp32>({.help = "Modules whose parameters stay fp32",
                                       .default_word = "BatchNorm",
                                       .flag = {"keep-fp32"}}),
          field<&Options::rounding_seed>({.help = "Seed of stochastic rounding"})),
      section("Limits",
              field<&Options::device_memory_bytes>(
                  {.help = "Most bytes of a rank's tensors on its device",
                   .unit = kBytes,
                   .default_word = "no limit",
                   .flag = {"device-memory", "SIZE"}}),
              field<&Options::host_memory_bytes>(
                  {.help = "Most bytes of tensors in a host's memory, over all of its ranks",
                   .unit = kBytes,
                   .default_word = "no limit",
                   .flag = {"host-memory", "SIZE"}})),
      section("Away from the device",
              field<&Options::offload>({.help = "What leaves the device"})));
}
static_assert(memory::tells_all_fields<Options>());

}  // namespace zeropage
