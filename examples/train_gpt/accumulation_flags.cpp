#include "examples/train_gpt/accumulation_flags.h"

#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "examples/train_gpt/value_options.h"

namespace train_gpt {
namespace {

void add_precision(CLI::App& app, PrecisionFlags& flags) {
  app.add_option("--reduce-dtype", flags.reduce_dtype,
                 "In what gradients travel between ranks; auto: compute's, fp32 where "
                 "--world-invariant")
      ->check(CLI::IsMember({"auto", "compute", "fp32"}))
      ->option_text("{auto,compute,fp32}=auto");
  app.add_option("--accumulate-dtype", flags.accumulate_dtype,
                 "In what gradients are kept and added up; auto: fp32 with --accumulate above 1")
      ->check(CLI::IsMember({"auto", "compute", "fp32"}))
      ->option_text("{auto,compute,fp32}=auto");
  app.add_option(
         "--low-precision-update", flags.update,
         "Of bf16 and fp16 parameters: fp32 master weights; split: the 16 bits of them that "
         "bf16 lacks; none, and rounded stochastically (bf16) or to nearest")
      ->check(CLI::IsMember({"master", "split", "stochastic", "nearest"}))
      ->option_text("{master,split,stochastic,nearest}=master");
  app.add_option("--optimizer-state", flags.optimizer_state,
                 "In what the optimizer's states are kept; 8bit: by blocks of 256, and fp32 for "
                 "parameters of fewer than 4096 elements")
      ->check(CLI::IsMember({"fp32", "bf16", "8bit"}))
      ->option_text("{fp32,bf16,8bit}=fp32");
  app.add_option("--keep-fp32", flags.keep_fp32,
                 "Modules whose parameters stay fp32, such as '*norm'; on cuda the model's norms "
                 "refuse to mix")
      ->option_text("PATTERN");
  app.add_option("--loss-scale", flags.loss_scale,
                 "Factor on the loss, a power of two; auto: 1, for fp16 dynamic from 65536")
      ->option_text("{auto,X}=auto");
}

}  // namespace

void add_accumulation(CLI::App& app, Flags& flags) {
  add_precision(app, flags.precision);
  app.add_option("--reduce-micro-steps", flags.reduce_micro_steps,
                 "Gradients go over the wire at each micro-step, or are kept whole and go once; "
                 "auto: once where they fit --gradient-budget")
      ->check(CLI::IsMember({"auto", "each", "once"}))
      ->option_text("{auto,each,once}=auto");
  add_bytes(app, "--gradient-budget", flags.gradient_budget_bytes, 1,
            "Most bytes of whole gradients that a rank keeps over micro-steps")
      ->option_text("BYTES");
  app.add_option("--clip-norm", flags.clip_norm, "Largest norm of all gradients; 0: any")
      ->option_text("X");
  app.add_option("--spike-z", flags.spike_z,
                 "Skip steps whose norm is so many standard deviations above the last 128; 0: none")
      ->option_text("Z");
  app.add_flag("--world-invariant", flags.world_invariant,
               "The same bits for any power-of-two split of the micro-batches over ranks and "
               "--accumulate; one thread a rank unless --threads says more");
  app.add_option_function<std::vector<int64_t>>(
         "--inject-inf",
         [&flags](const std::vector<int64_t>& at) {
           flags.injection =
               Injection{static_cast<int>(at[0]), at[1], at[2], at.size() > 3 ? at[3] : 0};
         },
         "For tests: an infinity in a gradient of that rank and layer at that micro-step of a step "
         "(0), all from 0")
      ->expected(3, 4)
      ->delimiter(',')
      ->check(non_negative())
      ->option_text("RANK,LAYER,MICRO_STEP[,STEP]")
      ->group("For tests");
}

void check_accumulation(const Flags& flags) {
  const auto require = [](bool condition, const std::string& message) {
    if (!condition) throw CLI::ValidationError(message);
  };
  const PrecisionFlags& precision = flags.precision;
  const bool low = flags.compute_dtype != "fp32";
  require(std::isfinite(flags.clip_norm) && flags.clip_norm >= 0,
          c10::str("--clip-norm ", flags.clip_norm, ": expected a finite number > 0"));
  require(std::isfinite(flags.spike_z) && flags.spike_z >= 0,
          c10::str("--spike-z ", flags.spike_z, ": expected standard deviations > 0, such as 6"));
  const std::string of_low =
      " is about parameters in a lower precision; use --compute-dtype bf16 or fp16, or leave it "
      "out";
  require(low || precision.accumulate_dtype != "compute", "--accumulate-dtype compute" + of_low);
  require(low || precision.update == "master", "--low-precision-update" + of_low);
  require(low || precision.keep_fp32.empty(), "--keep-fp32" + of_low);
  require(flags.compute_dtype != "fp16" || precision.update != "stochastic",
          "--low-precision-update stochastic: is for bf16; use master");
  require(flags.compute_dtype != "fp16" || precision.update != "split",
          "--low-precision-update split: is for bf16; use master");
  require(precision.optimizer_state == "fp32" || flags.optimizer != "sgd",
          "--optimizer-state: plain SGD keeps no state; leave it out or use another --optimizer");
  require(!flags.world_invariant || precision.reduce_dtype != "compute" || !low,
          "--world-invariant: sums in fp32; leave --reduce-dtype out");
  require(!flags.world_invariant || precision.accumulate_dtype != "compute",
          "--world-invariant: sums in fp32; leave --accumulate-dtype out");
  require(!flags.world_invariant || flags.reduce_micro_steps != "once",
          "--world-invariant: adds up the ranks at each micro-step; use --reduce-micro-steps each "
          "or auto");
  if (precision.loss_scale == "auto") return;
  char* end = nullptr;
  const double scale = std::strtod(precision.loss_scale.c_str(), &end);
  int exponent = 0;
  require(*end == '\0' && scale > 0 && std::isfinite(scale) && std::frexp(scale, &exponent) == 0.5,
          "--loss-scale " + precision.loss_scale + ": expected auto or a power of two");
}

}  // namespace train_gpt
