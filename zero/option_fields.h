// The tables of Options and OffloadOptions (memory/fields.h): the words for their values, and one line on each field. The flags are
// train_gpt's. The headers' comments explain at length what is one line here.
#pragma once

#include "memory/dtype_fields.h"
#include "zero/options.h"

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

namespace offload {

constexpr auto words_of(std::type_identity<StateFormat>) {
  using memory::word;
  return std::array{word<StateFormat::kFp32>("fp32"), word<StateFormat::kBf16>("bf16"),
                    word<StateFormat::k8Bit>("8bit")};
}

}  // namespace offload

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
          {.help = "Where the optimizer's states and fp32 values are, and its step is made",
           .flag = {"offload-optimizer"}}),
      field<&OffloadOptions::parameters>(
          {.help = "Where sharded parameters are between their uses (stage 3)",
           .flag = {"offload-parameters"}}),
      field<&OffloadOptions::step>(
          {.help = "When the step on offloaded state is made: in step(); as gradients come, in the "
                   "middle of backward; or one step late, beside the next one (other results)",
           .flag = {"offload-step"}}),
      field<&OffloadOptions::optimizer_bytes>(
          {.help = "The most of values, states and gradients that leaves a rank (unset: all)",
           .unit = kBytes,
           .default_word = "all",
           .flag = {"offload-bytes"},
           .bounds = Bounds::at_least(1)}),
      field<&OffloadOptions::worker_threads>(
          {.help = "Threads of that step, beside --threads (0: the rank's cores)",
           .flag = {"offload-threads"},
           .bounds = Bounds::range(0, 4096),
           .compared = Compared::kNo}),
      field<&OffloadOptions::link_bytes_per_second>(
          {.help = "Bytes a second of a link that copies are slowed down to, in each direction, to "
                   "measure on a host (unset: not)",
           .unit = kBytes,
           .default_word = "unset",
           .flag = {"link-speed"},
           .bounds = Bounds::at_least(1),
           .compared = Compared::kNo}),
      field<&OffloadOptions::nvme_directory>(
          {.help = "The folder on a local disk for what is offloaded to nvme",
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
          field<&Options::shard_within>(
              {.help =
                   "Neighbouring ranks that share it, each such group all of it (hybrid sharding); "
                   "unset: all ranks",
               .default_word = "all",
               .flag = {"shard-within", "RANKS"},
               .bounds = Bounds::at_least(2)}),
          field<&Options::secondary_shard_within>(
              {.help = "Neighbouring ranks that keep each page a second time among them, so that "
                       "backward gathers it there (stage 3); unset: none",
               .default_word = "none",
               .flag = {"secondary-shard-within", "RANKS"},
               .bounds = Bounds::at_least(2)}),
          field<&Options::page_bytes>({.help = "Size of a page, the unit of communication",
                                       .unit = kBytes,
                                       .default_word = "16MiB, on cuda 64MiB",
                                       .flag = {"page-bytes", "BYTES="},
                                       .bounds = Bounds::at_least(4096)}),
          field<&Options::parameter_budget_bytes>(
              {.help = "Most bytes of whole parameters a rank holds at stage 3; unset: two largest "
                       "pages",
               .unit = kBytes,
               .default_word = "unset",
               .flag = {"parameter-budget", "BYTES"},
               .bounds = Bounds::at_least(1)}),
          field<&Options::prefetch_bytes>({.help = "Fetch parameters ahead of their use at stage 3",
                                           .unit = kBytes,
                                           .default_word = "two largest pages",
                                           .flag = {"prefetch"}}),
          field<&Options::reshard>(
              {.help = "At stage 3 whole parameters go after their use, after backward (one gather "
                       "less a micro-step) or after the step (one gather a step)",
               .flag = {"reshard", "{}="}}),
          field<&Options::minimum_sharded_bytes>(
              {.help = "At stage 3 the parameters of smaller pages stay whole on every rank",
               .unit = kBytes})),
      section("What is computed",
              field<&Options::world_invariant>(
                  {.help = "The same bits for any power-of-two split of the micro-batches over "
                           "ranks and --accumulate",
                   .flag = {"world-invariant"}}),
              field<&Options::update_by>(
                  {.help = "The optimizer's update: by torch::optim's class, with its bits, or in "
                           "one fused pass; auto: fused where the class has such a form"}),
              field<&Options::broadcast_buffers>(
                  {.help = "Backward ends by giving all ranks rank 0's buffers"})),
      section(
          "Precision",
          field<&Options::compute_dtype>({.help = "Of parameters, gradients and activations",
                                          .default_word = "as the module is",
                                          .flag = {"compute-dtype", "{}="}}),
          field<&Options::reduce_dtype>(
              {.help = "In what gradients travel between ranks", .flag = {"reduce-dtype"}}),
          field<&Options::accumulate_dtype>(
              {.help = "In what gradients are kept and added up", .flag = {"accumulate-dtype"}}),
          field<&Options::low_precision_update>(
              {.help =
                   "Of bf16 and fp16 parameters: fp32 master weights; split: the 16 bits of them "
                   "that bf16 lacks; none, and rounded stochastically (bf16) or to nearest",
               .flag = {"low-precision-update", "{}="}}),
          field<&Options::optimizer_state>(
              {.help = "In what the optimizer's states are kept; 8bit: by blocks of 256, and fp32 "
                       "for parameters of fewer than 4096 elements",
               .flag = {"optimizer-state", "{}="}}),
          field<&Options::stays_fp32>({.help = "Modules whose parameters stay fp32",
                                       .default_word = "BatchNorm",
                                       .flag = {"keep-fp32"}}),
          field<&Options::rounding_seed>({.help = "Of what is rounded at random"})),
      section("Limits",
              field<&Options::device_memory_bytes>(
                  {.help = "Most bytes that a rank's tensors take on its device",
                   .unit = kBytes,
                   .default_word = "no limit",
                   .flag = {"device-memory", "SIZE"}}),
              field<&Options::host_memory_bytes>(
                  {.help = "Most bytes that the tensors of all ranks of a host take of its memory",
                   .unit = kBytes,
                   .default_word = "no limit",
                   .flag = {"host-memory", "SIZE"}})),
      section("Away from the device",
              field<&Options::offload>({.help = "What leaves the device"})));
}
static_assert(memory::tells_all_fields<Options>());

}  // namespace zeropage
