// The tables of train_gpt's own flags (zeropage/fields.h), section by section as help lists them. A flag whose value needs a parser of
// its own, such as --inject-inf, is in flags.cpp.
#pragma once

#include "bench/train_gpt/flags.h"
#include "comm/world_fields.h"
#include "zeropage/fields.h"

namespace train_gpt {

// The library's row of a world's option, which the command line takes in a form of its own.
template <auto Member>
constexpr zeropage::memory::FieldText own_form(std::string_view words = "") {
  zeropage::memory::FieldText text = zeropage::memory::text_of_field<Member>();
  if (!text.flag.help.empty()) text.help = text.flag.help;
  text.words = words;
  return text;
}

constexpr auto table_of(std::type_identity<GptConfig>) {
  using zeropage::memory::Bounds, zeropage::memory::field;
  return std::tuple(zeropage::memory::section(
      "Model",
      field<&GptConfig::d_model>(
          {.help = "Width of the model", .flag = {"d-model"}, .bounds = Bounds::positive()}),
      field<&GptConfig::layers>(
          {.help = "Transformer blocks", .flag = {"layers"}, .bounds = Bounds::positive()}),
      field<&GptConfig::heads>(
          {.help = "Attention heads of a block", .flag = {"heads"}, .bounds = Bounds::positive()}),
      field<&GptConfig::sequence>(
          {.help = "Tokens of a sample", .flag = {"sequence"}, .bounds = Bounds::positive()}),
      field<&GptConfig::dropout>(
          {.help = "Probability of dropout, from 0 to below 1", .flag = {"dropout", "P="}}),
      field<&GptConfig::untied_head>(
          {.help = "Give the head weights of its own, not the token embedding's",
           .flag = {"untied-head"}})));
}
static_assert(zeropage::memory::tells_all_fields<GptConfig>());

constexpr auto table_of(std::type_identity<ExpertFlags>) {
  using zeropage::memory::Bounds, zeropage::memory::field;
  return std::tuple(zeropage::memory::section(
      "Experts",
      field<&ExpertFlags::experts>(
          {.help = "Experts of each block, in the place of its MLP; 0: the MLP",
           .flag = {"experts"},
           .bounds = Bounds::positive()}),
      field<&ExpertFlags::active>(
          {.help = "Experts of a token", .flag = {"active"}, .bounds = Bounds::positive()}),
      field<&ExpertFlags::hidden>(
          {.help = "Features between an expert's two matrices; 0: 4 d-model / active, with which "
                   "a token takes as many weights as those of the MLP",
           .flag = {"expert-hidden"},
           .bounds = Bounds::not_negative()}),
      field<&ExpertFlags::balance_loss>(
          {.help = "Factor of the loss that evens out how often experts are chosen; 0.01 as in "
                   "Switch Transformers",
           .flag = {"balance-loss", "X="}}),
      field<&ExpertFlags::capacity>(
          {.help = "Most tokens of an expert in a micro-batch, over those of an even share; the "
                   "others are dropped; 0: none is",
           .flag = {"capacity", "X="}}),
      field<&ExpertFlags::parallel>(
          {.help = "Ranks that have some of the experts each (expert parallelism)",
           .flag = {"expert-parallel", "RANKS="},
           .bounds = Bounds::positive()}),
      field<&ExpertFlags::travel>({.help = "What travels between them: tokens, or auto: tokens or "
                                           "weights, whichever are fewer bytes a micro-step",
                                   .words = "tokens,auto",
                                   .flag = {"expert-travel", "{}="}})));
}
static_assert(zeropage::memory::tells_all_fields<ExpertFlags>());

constexpr auto table_of(std::type_identity<StateFlags>) {
  using zeropage::memory::Bounds, zeropage::memory::field;
  return std::tuple(zeropage::memory::section(
      "State",
      field<&StateFlags::folder>(
          {.help = "Save to DIR/step-N at the end; DIR/latest is the newest state",
           .flag = {"save", "DIR"}}),
      field<&StateFlags::every>({.help = "Save after every K steps too",
                                 .flag = {"save-every", "K"},
                                 .bounds = Bounds::positive()}),
      field<&StateFlags::saver>({}),
      field<&StateFlags::resume>(
          {.help = "Continue from a state, or a run's newest one, at any stage and number of ranks",
           .flag = {"resume", "DIR"}}),
      field<&StateFlags::load>({})));
}
static_assert(zeropage::memory::tells_all_fields<StateFlags>());

constexpr auto table_of(std::type_identity<ProfileFlags>) {
  using zeropage::memory::field;
  return std::tuple(zeropage::memory::section(
      "Profile",
      field<&ProfileFlags::report>(
          {.help = "Record the bytes of some steps: FILE.html, a page; FILE.json, for zp report",
           .flag = {"report", "FILE"}}),
      field<&ProfileFlags::trace>(
          {.help = "Record the bytes of some steps for ui.perfetto.dev: FILE.json",
           .flag = {"trace", "FILE"}}),
      field<&ProfileFlags::steps>({.help = "Steps to record, from 1 on; unset: the last three",
                                   .flag = {"profile-steps", "A-B"}})));
}
static_assert(zeropage::memory::tells_all_fields<ProfileFlags>());

constexpr auto table_of(std::type_identity<SimulationFlags>) {
  using zeropage::memory::Bounds, zeropage::memory::field;
  return std::tuple(zeropage::memory::section(
      "Simulation",
      field<&SimulationFlags::ranks_per_host>(
          {.help = "Ranks of a host, which share memory; 1: all send over TCP",
           .flag = {"ranks-per-host"},
           .bounds = Bounds::range(1, 4096)}),
      field<&SimulationFlags::within_host>(
          {.help = "Link between ranks of one host: latency in us and GB/s",
           .flag = {"within-host", "US,GB/S="},
           .bounds = Bounds::positive()}),
      field<&SimulationFlags::between_hosts>(
          {.help = "Link between ranks of two hosts: latency in us and GB/s",
           .flag = {"between-hosts", "US,GB/S="},
           .bounds = Bounds::positive()})));
}
static_assert(zeropage::memory::tells_all_fields<SimulationFlags>());

constexpr auto table_of(std::type_identity<Flags>) {
  using zeropage::memory::Bounds, zeropage::memory::field, zeropage::memory::section;
  return std::tuple(
      section("Text", field<&Flags::data>(
                          {.help = "Text file or folder of headers; auto: LibTorch's own headers",
                           .flag = {"data", "PATH|auto"}})),
      section("Batch", field<&Flags::batch>({.help = "Samples of a micro-batch",
                                             .flag = {"batch"},
                                             .bounds = Bounds::positive()})),
      section(
          "Steps",
          field<&Flags::global_batch>({.help = "Samples of a step over all ranks; sets "
                                               "--accumulate, or --batch if --accumulate is given",
                                       .flag = {"global-batch", "SAMPLES"},
                                       .bounds = Bounds::positive()}),
          field<&Flags::steps>(
              {.help = "Optimizer steps", .flag = {"steps"}, .bounds = Bounds::positive()}),
          field<&Flags::seconds>({.help = "End after about this many seconds of steps, at --steps "
                                          "at the latest; 0: at --steps",
                                  .flag = {"seconds"}}),
          field<&Flags::seed>(
              {.help = "Seed of weights, samples and the continuation", .flag = {"seed"}}),
          field<&Flags::lr>({.help = "Learning rate", .flag = {"lr"}}),
          field<&Flags::warmup_steps>(
              {.help = "First steps, in which the learning rate rises to --lr in equal parts",
               .flag = {"warmup-steps"},
               .bounds = Bounds::not_negative()}),
          field<&Flags::optimizer>({.help = "Optimizer",
                                    .words = "adamw,adam,sgd,lion,adagrad,muon,lamb,adafactor",
                                    .flag = {"optimizer", "{}="}}),
          field<&Flags::device>(own_form<&zeropage::comm::WorldOptions::device>("auto,cpu,cuda"))),
      section(
          "Ranks",
          field<&Flags::deterministic>(
              {.help =
                   "The same bits at every stage and in every run on cuda too, at a cost in time",
               .flag = {"deterministic"}}),
          field<&Flags::ranks>({.help = "Local ranks to start",
                                .flag = {"ranks"},
                                .bounds = Bounds::range(1, 4096)}),
          field<&Flags::tensor>({.help = "Neighbouring ranks that compute each sample together by "
                                         "slices of layers (tensor parallelism)",
                                 .flag = {"tensor", "RANKS="},
                                 .bounds = Bounds::positive()}),
          field<&Flags::context>(
              {.help = "Neighbouring ranks that have some of each sample's tokens (context "
                       "parallelism)",
               .flag = {"context", "RANKS="},
               .bounds = Bounds::positive()}),
          field<&Flags::context_form>({.help = "How attention runs over their tokens",
                                       .words = "ring,ulysses",
                                       .flag = {"context-form", "{}="}}),
          field<&Flags::pipeline>(
              {.help = "Ranks that have some of the layers each (pipeline parallelism)",
               .flag = {"pipeline", "RANKS="},
               .bounds = Bounds::positive()}),
          field<&Flags::schedule>({.help = "Order in which a pipeline's ranks run micro-batches",
                                   .words = "gpipe,1f1b,interleaved,zero-bubble",
                                   .flag = {"schedule", "{}="}}),
          field<&Flags::chunks>(
              {.help = "Pieces of the model on each rank, with --schedule interleaved",
               .flag = {"chunks"},
               .bounds = Bounds::positive()}),
          field<&Flags::timeline_path>(
              {.help =
                   "Write what a pipeline's ranks did in the last step, for zp schedule --times",
               .flag = {"timeline", "FILE"}}),
          field<&Flags::threads>(
              {.help = "Threads of a rank; 0: the cores, shared among local ranks",
               .flag = {"threads"},
               .bounds = Bounds::not_negative()})),
      section(
          "Run",
          field<&Flags::deferred>({.help = "Construct the model without memory for its parameters; "
                                           "auto: at stage 3, and on cuda",
                                   .words = "auto,on,off",
                                   .flag = {"deferred", "{}="}}),
          field<&Flags::communicator>(own_form<&zeropage::comm::WorldOptions::transport>(
              "auto,gloo,shared,nccl,simulated")),
          field<&Flags::deadline_seconds>(own_form<&zeropage::comm::WorldOptions::deadline>()),
          field<&Flags::probe>({.help = "Measure each rank's products, copies and links (and the "
                                        "disk of --save or nvme:DIR) for a second before the run, "
                                        "and name slow ranks",
                                .flag = {"probe"}}),
          field<&Flags::buddy_every>(
              {.help = "Copy the training state to the host's memory every K steps, to go on from "
                       "when zp run --restarts starts a rank again; 0: never",
               .flag = {"buddy-every", "K"},
               .bounds = Bounds::not_negative()}),
          field<&Flags::memory_rungs>(
              {.help =
                   "With --buddy-every: how often a run whose step does not fit the memory goes "
                   "back and takes less; 0: never",
               .flag = {"memory-rungs", "N"},
               .bounds = Bounds::not_negative()}),
          field<&Flags::sample>({.help = "Characters to write at the end",
                                 .flag = {"sample"},
                                 .bounds = Bounds::not_negative()}),
          field<&Flags::json_path>(
              {.help = "Write every figure to FILE", .flag = {"json", "FILE"}}),
          field<&Flags::peak_tflops>(
              {.help = "Peak TFLOPS of a rank, for the utilisation; 0: the device's, where known",
               .flag = {"peak-tflops"}}),
          field<&Flags::memory_snapshot_path>(
              {.help = "Write rank 0's CUDA allocator, for PyTorch's memory_viz",
               .flag = {"memory-snapshot", "FILE"}})));
}

}  // namespace train_gpt
