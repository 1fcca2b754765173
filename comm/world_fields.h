// The tables of the options of worlds (zeropage/fields.h). The flags are train_gpt's, which takes them in forms
// of its own.
#pragma once

#include "comm/launcher/launch_fields.h"
#include "zeropage/detail/dtype_fields.h"
#include "zeropage/simulation.h"
#include "zeropage/world.h"

namespace zeropage::comm {

constexpr auto words_of(std::type_identity<Transport>) {
  using memory::word;
  return std::array{word<Transport::kAuto>(name(Transport::kAuto)),
                    word<Transport::kGloo>(name(Transport::kGloo)),
                    word<Transport::kShared>(name(Transport::kShared)),
                    word<Transport::kNccl>(name(Transport::kNccl))};
}

constexpr auto words_of(std::type_identity<ReductionOrder>) {
  using memory::word;
  return std::array{word<ReductionOrder::kFast>(name(ReductionOrder::kFast)),
                    word<ReductionOrder::kFixed>(name(ReductionOrder::kFixed))};
}

constexpr auto table_of(std::type_identity<WorldOptions>) {
  using memory::field;
  return std::tuple(memory::section(
      "A world",
      field<&WorldOptions::deadline>(
          {.help = "How long a rank waits for another that shows no life or, within a call of "
                   "ours, makes no progress",
           .flag = {.name = "deadline",
                    .help = "Seconds a rank waits for another that shows no life"}}),
      field<&WorldOptions::busy_limit>(
          {.help = "How long a rank waits in one call for ranks that do work of their own"}),
      field<&WorldOptions::report_interval>(
          {.help = "How often a rank that waits for a busy one says so on stderr"}),
      field<&WorldOptions::device>(
          {.help =
               "Device of the tensors: the host, or the accelerator whose index is the local rank",
           .flag = {.name = "device",
                    .values = "{}=",
                    .help = "Where ranks train; auto: cuda where there is a device"}}),
      field<&WorldOptions::transport>(
          {.help = "What carries bytes between ranks: gloo (TCP), shared (memory of one host), "
                   "nccl (CUDA devices); auto: the fastest possible",
           .flag = {"communicator", "{}="}}),
      field<&WorldOptions::reduction_order>({.help = "Order of sums over NCCL: NCCL's own, or the "
                                                     "host's, which costs a buffer and time"}),
      field<&WorldOptions::decorate>({.help = "Function that wraps the world's communicator, to "
                                              "measure, delay or count what passes",
                                      .default_word = "as it is"})));
}
static_assert(memory::tells_all_fields<WorldOptions>());

constexpr auto table_of(std::type_identity<ThreadsOptions>) {
  using memory::field;
  return std::tuple(memory::section(
      "Ranks that are threads",
      field<&ThreadsOptions::threads_per_rank>(
          {.help = "LibTorch's intra-op threads of each rank"}),
      field<&ThreadsOptions::hosts>(
          {.help = "Name of each rank's host; ranks with the same name are on one host",
           .default_word = "all are"}),
      field<&ThreadsOptions::store>(
          {.help = "Where ranks meet: a store for each rank, or one for all",
           .default_word = "one in memory"})));
}
static_assert(memory::tells_all_fields<ThreadsOptions>());

constexpr auto table_of(std::type_identity<SimulationOptions>) {
  using memory::field;
  return std::tuple(memory::section(
      "A rank without the others",
      field<&SimulationOptions::rank>({.help = "The rank that is simulated"}),
      field<&SimulationOptions::topology>(
          {.help = "The ranks and their hosts", .default_word = "one rank"}),
      field<&SimulationOptions::transport>({.help = "Transport whose algorithms are counted"}),
      field<&SimulationOptions::within_host>(
          {.help = "A rank's link to ranks of its host", .default_word = "as a core copies"}),
      field<&SimulationOptions::between_hosts>(
          {.help = "A rank's link to ranks of other hosts", .default_word = "as fast TCP"}),
      field<&SimulationOptions::failures>(
          {.help = "Calls of operations that find a rank lost", .default_word = "none"})));
}
static_assert(memory::tells_all_fields<SimulationOptions>());

}  // namespace zeropage::comm
