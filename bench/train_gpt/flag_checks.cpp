#include "bench/train_gpt/flag_checks.h"

#include <cmath>

#include <CLI/CLI.hpp>

#include "bench/train_gpt/fitting.h"
#include "zeropage/check.h"
#include "zeropage/device.h"
#include "zeropage/survive.h"
#include "zeropage/world.h"

namespace train_gpt {
namespace {

void check_state(const StateFlags& state) {
  const zeropage::StateSaverOptions& saver = state.saver;
  const bool has_details = state.every > 0 || saver.keep_last > 0 || saver.keep_every > 0 ||
                           !saver.asynchronous || saver.on_signal;
  ZP_CHECK(state.saves() || !has_details,
           "--save-every, --keep-last, --keep-every, --save-async and --save-on-signal are about "
           "what is saved; use --save DIR, or leave them out");
  ZP_CHECK(saver.keep_every == 0 || saver.keep_last > 0, "--keep-every ", saver.keep_every,
           ": all states stay unless --keep-last says how many; use it, or leave this out");
  ZP_CHECK(!state.load.fall_back || !state.resume.empty(),
           "--resume-fall-back on: is about what is resumed; use --resume DIR, or leave it out");
}

void check_profile(const Flags& flags) {
  const ProfileFlags& profile = flags.profile;
  const auto require = [](bool condition, const std::string& message) {
    if (!condition) throw CLI::ValidationError(message);
  };
  require(profile.is_asked_for() || profile.steps.empty(),
          "--profile-steps: is about what --report or --trace shows; use one of them, or leave "
          "this out");
  if (!profile.is_asked_for()) return;
  require(!flags.simulates(),
          "--report, --trace: the steps of a simulated run take no time; leave them out, or use "
          "--json, which has its bytes");
  require(profile.report.ends_with(".html") || profile.report.ends_with(".json") ||
              profile.report.empty(),
          "--report " + profile.report +
              ": expected a name that ends in .html for a page, or in .json for zp report");
  require(profile.trace.ends_with(".json") || profile.trace.empty(),
          "--trace " + profile.trace + ": expected a name that ends in .json");
  profile.range(flags.steps);
}

void check_values(const Flags& flags) {
  const auto require = [](bool condition, const std::string& message) {
    if (!condition) throw CLI::ValidationError(message);
  };
  require(std::isfinite(flags.lr) && flags.lr >= 0,
          c10::str("--lr ", flags.lr, ": expected a finite number >= 0, such as 3e-4"));
  require(std::isfinite(flags.seconds) && flags.seconds >= 0,
          c10::str("--seconds ", flags.seconds, ": expected a finite number >= 0, such as 60"));
  require(flags.seconds == 0 || !flags.simulates(),
          "--seconds: the steps of a simulated run take no time; use --steps");
  require(flags.seconds == 0 || !flags.profile.is_asked_for() || !flags.profile.steps.empty(),
          "--seconds: which steps are the last is not known before; say with --profile-steps which "
          "ones --report and --trace show");
  require(
      flags.model.d_model % flags.model.heads == 0,
      c10::str("--heads ", flags.model.heads, ": does not divide --d-model ", flags.model.d_model));
  if (flags.injection) {
    require(flags.injection->layer < flags.model.layers &&
                flags.injection->micro_step < flags.accumulator.micro_steps &&
                flags.injection->step < flags.steps,
            "--inject-inf: no such layer, micro-step or step");
  }
  const zeropage::Options& options = flags.options;
  const bool shards_parameters = zeropage::zero::shards_parameters(options);
  require(options.parameter_budget_bytes == 0 || shards_parameters,
          "--parameter-budget: only stage 3 shards parameters; leave it out or use --stage 3");
  require(flags.forms.prefetch || shards_parameters,
          "--prefetch off: only stage 3 fetches parameters; leave it out or use --stage 3");
  require(options.reshard == zeropage::Reshard::kAfterUse || shards_parameters,
          "--reshard: only stage 3 shards parameters; leave it out or use --stage 3");
  const double dropout = flags.model.dropout;
  require(
      dropout >= 0 && dropout < 1,
      c10::str("--dropout ", dropout, ": expected a probability from 0 to below 1, such as 0.1"));
  require(dropout == 0 || !options.world_invariant,
          "--dropout: each rank draws its own masks, so no split has another's bits; leave it or "
          "--world-invariant out");
  check_own_forms(flags);
  check_state(flags.state);
  check_profile(flags);
  require(
      !flags.simulates() || (!flags.state.saves() && flags.state.resume.empty()),
      "--communicator simulated: its tensors have no values to save or resume; leave --save and "
      "--resume out");
  require(
      (!flags.state.saves() && flags.state.resume.empty()) ||
          options.offload.step != zeropage::StepWhen::kOneStepLate,
      "--offload-step late: a step is always under way, so no state is whole; use another step, "
      "or leave --save and --resume out");
  flags.checkpointing.check(flags.model.layers);
  require(
      !flags.simulates() || !flags.checkpointing.sees_values(),
      "--communicator simulated: computes no values to measure or offload; use "
      "--checkpoint-activations none, selective, blocks or every:K, and no --offload-activations");
  if (flags.device == "cuda" && !flags.simulates() && !zeropage::memory::has_cuda_driver()) {
    // Only here, where no rank will be forked, may CUDA be asked why.
    require(false, "--device cuda: " + zeropage::memory::obstacle_to({c10::kCUDA, 0}));
  }
  const bool on_cuda = flags.device_type() == torch::kCUDA && !flags.simulates();
  require(flags.communicator != "nccl" || on_cuda,
          "--communicator nccl: moves tensors between CUDA devices; use --device cuda, or auto, "
          "gloo or shared");
  require(flags.memory_snapshot_path.empty() || on_cuda,
          "--memory-snapshot: is of CUDA's allocator; use --device cuda or leave it out");
  require(flags.peak_tflops >= 0,
          c10::str("--peak-tflops ", flags.peak_tflops, ": expected a number > 0"));
  require(!flags.probe || !flags.simulates(),
          "--probe with --communicator simulated: a simulated rank has no machine; leave one out");
  require(flags.buddy_every == 0 || zeropage::ranks_are_restarted(),
          c10::str("--buddy-every ", flags.buddy_every,
                   ": nobody starts ranks of this run again; start it with zp run --restarts N -n "
                   "RANKS -- train_gpt ..."));
  require(flags.buddy_every == 0 || flags.seconds == 0,
          "--buddy-every with --seconds: a run that goes back has another time; use --steps");
  require(flags.memory_rungs == 0 || flags.buddy_every > 0,
          c10::str("--memory-rungs ", flags.memory_rungs,
                   ": a run that takes less memory goes on from a copy; give --buddy-every too"));
  require(flags.memory_rungs == 0 || flags.checkpointing.text == "none",
          c10::str("--memory-rungs ", flags.memory_rungs,
                   " chooses what is computed again; leave --checkpoint-activations ",
                   flags.checkpointing.text, " out"));
  const int64_t parts = parts_on(flags.memory_rungs);
  require(flags.batch % parts == 0,
          c10::str("--memory-rungs ", flags.memory_rungs,
                   ": the last rung cuts a micro-batch into ", parts, " parts, which ", flags.batch,
                   " samples are not; give fewer rungs, or another --batch"));
  require(flags.deadline_seconds > 0,
          c10::str("--deadline ", flags.deadline_seconds, ": expected seconds > 0"));
}

// What there is not yet for slices is refused.
void check_tensor(const Flags& flags) {
  if (flags.tensor == 1) return;
  const auto require = [&](bool condition, const std::string& why) {
    if (!condition) throw CLI::ValidationError(c10::str("--tensor ", flags.tensor, ": ", why));
  };
  const bool launched = zeropage::comm::launched_by_environment();
  const int ranks = launched ? zeropage::comm::read_place().world_size : flags.ranks;
  require(ranks % flags.tensor == 0,
          c10::str("does not divide the ", ranks, " ranks; expected a divisor"));
  require(flags.model.heads % flags.tensor == 0,
          c10::str("does not divide --heads ", flags.model.heads,
                   ", of which each rank computes its own"));
  require(flags.deferred != "on" || flags.simulates(),
          "layers are cut when they have values; leave --deferred on out");
  require(flags.checkpointing.policy != CheckpointFlags::Policy::kBudget,
          "ranks with slices of a layer would each choose what to repeat; use "
          "--checkpoint-activations selective, blocks or every:K");
}

// What there is not yet for samples that ranks share is refused.
void check_context(const CLI::App& app, const Flags& flags) {
  const auto given = [&](const char* flag) { return app.get_option(flag)->count() > 0; };
  const auto require = [&](bool condition, const std::string& why) {
    if (!condition) throw CLI::ValidationError(why);
  };
  require(
      flags.context > 1 || !given("--context-form"),
      "--context-form: is about samples that ranks share; use --context RANKS, or leave it out");
  if (flags.context == 1) return;
  const std::string who = c10::str("--context ", flags.context, ": ");
  const bool launched = zeropage::comm::launched_by_environment();
  const int ranks = launched ? zeropage::comm::read_place().world_size : flags.ranks;
  require(ranks % flags.ranks_of_sample() == 0,
          c10::str(who, "with --tensor ", flags.tensor, " does not divide the ", ranks,
                   " ranks; expected a divisor"));
  require(flags.model.sequence % (2 * flags.context) == 0,
          c10::str(who, "expected --sequence in chunks of two for each rank, a multiple of ",
                   2 * flags.context, ", got ", flags.model.sequence));
  const int64_t heads = flags.model.heads / flags.tensor;
  require(flags.context_form != "ulysses" || heads % flags.context == 0,
          c10::str(who, "--context-form ulysses: does not divide ", heads,
                   " heads of a rank, of which each computes some; use ring"));
  require(flags.pipeline == 1, who + "not with --pipeline yet; leave one of them out");
  require(flags.model.dropout == 0,
          who + "attention over ranks drops no weights; leave --dropout out");
  require(
      !given("--sample"),
      who +
          "a text that is written grows by a token, which no ranks can split; leave --sample out");
}

// Whether experts are given, divide, and go with the rest.
void check_experts(const CLI::App& app, const Flags& flags) {
  const auto given = [&](const char* flag) { return app.get_option(flag)->count() > 0; };
  const auto require = [&](bool condition, const std::string& why) {
    if (!condition) throw CLI::ValidationError(why);
  };
  const ExpertFlags& experts = flags.experts;
  for (const char* flag : {"--active", "--expert-hidden", "--balance-loss", "--capacity",
                           "--expert-parallel", "--expert-travel"}) {
    require(experts.any() || !given(flag),
            c10::str(flag, ": is about experts; use --experts E, or leave it out"));
  }
  if (!experts.any()) return;
  require(experts.active <= experts.experts,
          c10::str("--active ", experts.active, ": a token takes at most all of --experts ",
                   experts.experts));
  const int64_t width_of_mlp = 4 * flags.model.d_model;
  require(experts.hidden > 0 || width_of_mlp % experts.active == 0,
          c10::str("--active ", experts.active, ": does not divide the MLP's ", width_of_mlp,
                   " features; say with --expert-hidden how many an expert has"));
  for (const auto& [flag, value] :
       {std::pair("--balance-loss", experts.balance_loss), {"--capacity", experts.capacity}}) {
    require(std::isfinite(value) && value >= 0,
            c10::str(flag, " ", value, ": expected a finite number >= 0"));
  }
  const std::string who = c10::str("--experts ", experts.experts, ": ");
  require(flags.tensor == 1, who + "--tensor cuts no experts; leave one of them out");
  require(!flags.checkpointing.tiles_mlps,
          who + "a loss of balance is of all tokens at once; leave --tiled-mlp out");
  require(flags.pipeline == 1,
          who + "stages before the last have no loss to even out experts by; leave --pipeline out");
  require(flags.optimizer != "muon",
          who + "Muon has no group of stacked matrices here; use another --optimizer");
  require(experts.parallel > 1 || !given("--expert-travel"),
          "--expert-travel: is about ranks that have some of the experts each; use "
          "--expert-parallel RANKS, or leave it out");
  if (experts.parallel == 1) return;
  const std::string spread = c10::str("--expert-parallel ", experts.parallel, ": ");
  const bool launched = zeropage::comm::launched_by_environment();
  const int ranks = launched ? zeropage::comm::read_place().world_size : flags.ranks;
  require(experts.experts % experts.parallel == 0,
          c10::str(spread, "does not divide --experts ", experts.experts, "; expected a divisor"));
  require(ranks % (experts.parallel * flags.context) == 0,
          c10::str(spread, "with --context ", flags.context, " does not divide the ", ranks,
                   " ranks; expected a divisor"));
  const zeropage::Options& options = flags.options;
  require(options.shard_within == zeropage::Options::kAllRanks,
          spread +
              "experts are shared by the ranks that have the same ones; leave --shard-within "
              "out");
  require(options.secondary_shard_within == zeropage::Options::kNoSecondaryShards,
          spread + "experts have no second copy; leave --secondary-shard-within out");
  require(!options.world_invariant,
          spread +
              "an expert's products are of the tokens that came, whose order other splits do "
              "not have; leave --world-invariant out");
  require(flags.optimizer != "lamb" && flags.optimizer != "adafactor",
          c10::str(spread, "--optimizer ", flags.optimizer,
                   " wants whole tensors, and ranks have some of the experts; use another"));
  require(flags.checkpointing.policy != CheckpointFlags::Policy::kBudget,
          spread +
              "ranks would each choose what to repeat; use --checkpoint-activations selective, "
              "blocks or every:K");
  require(!flags.has_limits() || experts.travel == "tokens",
          spread +
              "a plan of what fits has tokens that travel; leave --expert-travel auto out, or "
              "--device-memory and --host-memory");
}

// What there is not yet for stages is refused.
void check_pipeline(const CLI::App& app, const Flags& flags) {
  const auto given = [&](const char* flag) { return app.get_option(flag)->count() > 0; };
  const auto require = [&](bool condition, const std::string& why) {
    if (!condition) throw CLI::ValidationError(why);
  };
  for (const char* flag : {"--schedule", "--timeline"}) {
    require(flags.pipeline > 1 || !given(flag),
            c10::str(flag, ": is about a pipeline; use --pipeline RANKS, or leave it out"));
  }
  require(flags.schedule == "interleaved" || !given("--chunks"),
          "--chunks: only the schedule interleaved has several pieces a rank; use --schedule "
          "interleaved, or leave it out");
  if (flags.pipeline == 1) return;
  const std::string who = c10::str("--pipeline ", flags.pipeline, ": ");
  const bool launched = zeropage::comm::launched_by_environment();
  const int ranks = launched ? zeropage::comm::read_place().world_size : flags.ranks;
  require(ranks % flags.ranks_of_model() == 0,
          c10::str(who, "with --tensor ", flags.tensor, " does not divide the ", ranks,
                   " ranks; expected a divisor"));
  const int stages = flags.pipeline * flags.chunks_of_rank();
  require(flags.model.layers >= stages,
          c10::str(who, "expected at least a block for each of ", stages, " stages, got --layers ",
                   flags.model.layers, "; raise it, or use fewer ranks or --chunks"));
  try {
    const auto schedule =
        zeropage::parallel::make_schedule(flags.schedule_kind(), flags.chunks_of_rank());
    const char* const repeats = flags.checkpointing.tiles_mlps       ? "--tiled-mlp"
                                : flags.checkpointing.text != "none" ? "--checkpoint-activations"
                                                                     : nullptr;
    require(!schedule->splits_backward() || repeats == nullptr,
            c10::str(who, "--schedule ", flags.schedule, " would repeat what ", repeats,
                     " drops in each half of a backward; use 1f1b, or leave ", repeats, " out"));
    schedule->actions(flags.pipeline, static_cast<int>(flags.accumulator.micro_steps));
  } catch (const std::invalid_argument& error) {
    throw CLI::ValidationError(
        c10::str(who, error.what(), " (micro-batches are those of --accumulate)"));
  }
  require(!given("--sample"), who + "no rank has all layers to write text by; leave --sample out");
  require(!flags.injection,
          who + "--inject-inf is for a model that is whole on each rank; leave it out");
  require(!given("--deferred"),
          who + "a rank constructs its own layers alone, without a choice; leave --deferred out");
  require(flags.checkpointing.policy != CheckpointFlags::Policy::kBudget,
          who +
              "the plan of a budget sees one micro-batch at a time, and here several are under "
              "way; use --checkpoint-activations selective, blocks or every:K");
  require(flags.options.offload.step == zeropage::StepWhen::kInStep,
          who +
              "stages agree on a step when all have ended their backwards; use --offload-step "
              "step");
  require(flags.chunks_of_rank() == 1 || !flags.options.world_invariant,
          who +
              "with several pieces a rank, micro-batches do not add up in the order of "
              "--world-invariant; leave it out, or use another --schedule");
}

void check_simulation(const CLI::App& app, const Flags& flags) {
  const auto refuse = [&](const char* flag, const std::string& why) {
    if (app.get_option(flag)->count() > 0) throw CLI::ValidationError(flag + (": " + why));
  };
  if (!flags.simulates()) {
    for (const char* flag : {"--ranks-per-host", "--within-host", "--between-hosts"}) {
      refuse(flag, "only a simulated run has it; leave it out or use --communicator simulated");
    }
    return;
  }
  const std::string without_values = " a simulated run computes no values; leave it out";
  refuse("--data", "reads text, but" + without_values);
  refuse("--sample", "writes text, but" + without_values);
  refuse("--dropout", "draws masks, but" + without_values);
  refuse("--deadline", "waits for ranks, but a simulated run has no others; leave it out");
  if (flags.deferred == "off" && !flags.simulates_cuda()) {
    refuse("--deferred", "off: fills the model, but" + without_values);
  }
  if (zeropage::comm::launched_by_environment()) {
    throw CLI::ValidationError(
        "--communicator simulated: runs all ranks in one process; start it without a launcher");
  }
}

// What is chosen below the limits of memory cannot be given, and what no plan knows goes without limits.
void check_limits(const CLI::App& app, const Flags& flags) {
  const auto refuse = [&](const char* flag, const std::string& why) {
    if (app.get_option(flag)->count() > 0) throw CLI::ValidationError(flag + (": " + why));
  };
  if (!flags.has_limits()) {
    const std::string without =
        "is what may be used below --device-memory or --host-memory; give one of them, or use "
        "--offload-optimizer nvme:DIR";
    refuse("--nvme", without);
    refuse("--nvme-size", without);
    return;
  }
  if (flags.fit.nvme_directory.empty()) refuse("--nvme-size", "of no folder; use --nvme DIR");
  for (const char* flag : {"--offload-optimizer", "--offload-parameters"}) {
    refuse(flag, "is chosen below --device-memory and --host-memory; leave it out, or them");
  }
  const std::string not_planned =
      "is in no plan of what fits; leave it out, or --device-memory and --host-memory";
  for (const char* flag : {"--offload-activations", "--offload-bytes"}) refuse(flag, not_planned);
  const std::string& policy = flags.checkpointing.text;
  if (policy != "none" && policy != "blocks" && policy != "selective") {
    refuse("--checkpoint-activations", policy + " " + not_planned);
  }
  if (flags.tensor > 1) refuse("--tensor", not_planned);
  if (flags.pipeline > 1) refuse("--pipeline", not_planned);
  if (flags.state.saves() && flags.state.saver.asynchronous) {
    refuse("--save",
           "writes beside training from a copy, which is in no plan of what fits; use --save-async "
           "off, or leave --device-memory and --host-memory out");
  }
}

void check_launcher(const CLI::App& app, const Flags& flags) {
  const auto place = zeropage::comm::read_place();
  if (!zeropage::comm::launched_by_environment() || app.get_option("--ranks")->count() == 0) return;
  if (flags.ranks != place.world_size) {
    throw CLI::ValidationError(c10::str("--ranks ", flags.ranks, ": ", place.launcher, " started ",
                                        place.world_size,
                                        " ranks; leave --ranks out under a launcher"));
  }
}

}  // namespace

void check_flags(const CLI::App& app, const Flags& flags) {
  check_values(flags);
  check_tensor(flags);
  check_context(app, flags);
  check_experts(app, flags);
  check_pipeline(app, flags);
  check_simulation(app, flags);
  check_limits(app, flags);
  check_launcher(app, flags);
}

}  // namespace train_gpt
