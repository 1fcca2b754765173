// The tables of AccumulatorOptions and of what it has (zeropage/fields.h), as zeropage/option_fields.h.
#pragma once

#include "zeropage/accumulator.h"
#include "zeropage/fields.h"

namespace zeropage::accumulate {

constexpr auto words_of(std::type_identity<AtMinimum>) {
  using memory::word;
  return std::array{word<AtMinimum::kContinue>("continue"), word<AtMinimum::kStop>("stop")};
}

constexpr auto words_of(std::type_identity<OnSpike>) {
  using memory::word;
  return std::array{word<OnSpike::kSkip>("skip"), word<OnSpike::kStop>("stop")};
}

constexpr auto table_of(std::type_identity<LossScalerOptions>) {
  using memory::field;
  return std::tuple(memory::section(
      "The scale of the loss",
      field<&LossScalerOptions::initial_scale>(
          {.help = "Factor on the loss, a power of two", .flag = {"loss-scale"}}),
      field<&LossScalerOptions::growth_factor>(
          {.help = "Factor by which the scale grows; a power of two"}),
      field<&LossScalerOptions::backoff_factor>(
          {.help = "Factor by which an overflow lowers the scale; a power of two"}),
      field<&LossScalerOptions::growth_interval>(
          {.help = "Good steps in a row before the scale grows", .unit = "steps"}),
      field<&LossScalerOptions::hysteresis>(
          {.help = "Overflows before the scale is lowered", .unit = "steps"}),
      field<&LossScalerOptions::min_scale>({.help = "The lowest scale, a power of two"}),
      field<&LossScalerOptions::max_scale>({.help = "The highest scale, a power of two"}),
      field<&LossScalerOptions::at_minimum>(
          {.help = "Whether an overflow at the lowest scale skips the step or throws"})));
}
static_assert(memory::tells_all_fields<LossScalerOptions>());

constexpr auto table_of(std::type_identity<NormSpikeOptions>) {
  using memory::field;
  return std::tuple(memory::section(
      "Spikes of the gradient's norm",
      field<&NormSpikeOptions::z_score>(
          {.help = "Skip steps whose norm is this many standard deviations above recent norms",
           .flag = {"spike-z", "Z"}}),
      field<&NormSpikeOptions::window>(
          {.help = "Accepted norms that are remembered", .unit = "steps"}),
      field<&NormSpikeOptions::warm_up>(
          {.help = "Norms that are accepted before any is judged", .unit = "steps"}),
      field<&NormSpikeOptions::least_deviation>(
          {.help = "Least deviation, as a share of the mean"}),
      field<&NormSpikeOptions::on_spike>({.help = "Whether a spike skips the step or throws"}),
      field<&NormSpikeOptions::most_in_a_row>(
          {.help = "Spikes in a row that are skipped before they count as a new level",
           .unit = "steps"})));
}
static_assert(memory::tells_all_fields<NormSpikeOptions>());

}  // namespace zeropage::accumulate

namespace zeropage {

constexpr auto words_of(std::type_identity<ReduceMicroSteps>) {
  using memory::word;
  return std::array{word<ReduceMicroSteps::kAuto>("auto"), word<ReduceMicroSteps::kEach>("each"),
                    word<ReduceMicroSteps::kOnce>("once")};
}

constexpr auto words_of(std::type_identity<IncompleteStep>) {
  using memory::word;
  return std::array{word<IncompleteStep::kRefuse>("refuse"), word<IncompleteStep::kWarn>("warn")};
}

constexpr auto table_of(std::type_identity<AccumulatorOptions>) {
  using memory::Bounds, memory::Compared, memory::field, memory::kBytes, memory::section;
  return std::tuple(
      section(
          "Micro-steps",
          field<&AccumulatorOptions::micro_steps>(
              {.help = "Micro-batches of a step on each rank; global batch = batch x accumulate x "
                       "ranks",
               .flag = {"accumulate", "K="},
               .bounds = Bounds::positive()}),
          field<&AccumulatorOptions::incomplete>(
              {.help = "Whether step() throws before the last micro-step, or warns and steps"})),
      section(
          "Gradients",
          field<&AccumulatorOptions::loss_scaler>(
              {.help = "The factor on the loss", .default_word = "dynamic for fp16, else none"}),
          field<&AccumulatorOptions::reduce>(
              {.help =
                   "Reduce gradients at each micro-step, or once; auto: once at stages 0 and 1, on "
                   "one rank, and within --gradient-budget, which adds up in another order",
               .flag = {"reduce-micro-steps", "{}="}}),
          // What follows from it is compared: reduce.
          field<&AccumulatorOptions::gradient_budget_bytes>(
              {.help =
                   "Most bytes of whole gradients that a rank keeps over micro-steps at stages 2 "
                   "and 3",
               .unit = kBytes,
               .default_word = "none",
               .flag = {"gradient-budget", "BYTES"},
               .bounds = Bounds::at_least(1),
               .compared = Compared::kNo}),
          field<&AccumulatorOptions::clip_norm>({.help = "Largest norm of all gradients",
                                                 .default_word = "none",
                                                 .flag = {"clip-norm", "X"}}),
          field<&AccumulatorOptions::clip_value>(
              {.help = "Largest magnitude of a gradient's element", .default_word = "none"}),
          field<&AccumulatorOptions::norm_spikes>(
              {.help = "Which norms count as spikes", .default_word = "none"})));
}
static_assert(memory::tells_all_fields<AccumulatorOptions>());

}  // namespace zeropage
