#include "bench/train_gpt/flags.h"

#include <iostream>
#include <vector>

#include <CLI/CLI.hpp>

#include "accumulate/accumulator_fields.h"
#include "bench/train_gpt/field_flags.h"
#include "bench/train_gpt/flag_checks.h"
#include "bench/train_gpt/flag_fields.h"
#include "examples/command_line/command_line.h"
#include "saving/state_fields.h"
#include "zeropage/batches.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"
#include "zeropage/device.h"
#include "zeropage/option_fields.h"
#include "zeropage/world.h"

namespace train_gpt {
namespace {

// Adds the flags of tables in the order of help.
class CommandLine {
 public:
  CommandLine(CLI::App& app, Flags& flags) : app_(app), flags_(flags) {}

  // The flags of a section, or without a title of all sections. In help they are a group under the section's
  // title, or under `group`.
  template <typename S>
  void add(S& options, std::string_view title = "", std::string_view group = "") {
    zeropage::memory::for_each_section<S>([&](const auto& section) {
      if (!title.empty() && section.title != title) return;
      const std::string heading(group.empty() ? section.title : group);
      for_each_flag(section, options,
                    [&](const auto& field, auto& in) { add_one(field, in, heading); });
    });
  }

 private:
  template <typename F, typename S>
  void add_one(const F& field, S& options, const std::string& group) {
    const std::string flag = "--" + std::string(field.text.flag.name);
    if (!add_own_form(app_, field.text, flags_.forms)) {
      add_flag(app_, field, std::string(field.text.help), options);
    }
    app_.get_option(flag)->group(group);
  }

  CLI::App& app_;
  Flags& flags_;
};

void add_checkpointing(CLI::App& app, CheckpointFlags& flags) {
  app.add_option_function<std::string>(
         "--checkpoint-activations",
         [&flags](const std::string& text) { flags.parse_policy(text); },
         "Activations that backward computes again: of each block, or of regions of K blocks but "
         "the last one (sqrt: of the square root of all)")
      ->option_text("{none,blocks,every:K,every:sqrt,selective,budget:BYTES}=none")
      ->group("Activations");
  app.add_flag("--tiled-mlp", flags.tiles_mlps,
               "Run MLPs on some tokens at a time, which backward computes again")
      ->group("Activations");
  app.add_option_function<std::string>(
         "--offload-activations", [&flags](const std::string& text) { flags.parse_offload(text); },
         "Where activations are until backward")
      ->option_text("{none,host,nvme:DIR}=none")
      ->group("Activations");
}

void add_nvme(CLI::App& app, FitFlags& fit) {
  app.add_option(
         "--nvme", fit.nvme_directory,
         "Folder on a local disk for state that does not fit --device-memory and --host-memory")
      ->option_text("DIR")
      ->group("Limits");
  examples::add_bytes(app, "--nvme-size", fit.nvme_bytes, 1,
                      "Most bytes in it, for all ranks of a host; unset: what the disk has")
      ->option_text("SIZE")
      ->group("Limits");
}

void add_injection(CLI::App& app, Flags& flags) {
  app.add_option_function<std::vector<int64_t>>(
         "--inject-inf",
         [&flags](const std::vector<int64_t>& at) {
           flags.injection =
               Injection{static_cast<int>(at[0]), at[1], at[2], at.size() > 3 ? at[3] : 0};
         },
         "Put an infinity into a gradient of that rank and layer at that micro-step of that step "
         "(0); all count from 0")
      ->expected(3, 4)
      ->delimiter(',')
      ->check(examples::non_negative())
      ->option_text("RANK,LAYER,MICRO_STEP[,STEP]")
      ->group("For tests");
}

void add_flags(CLI::App& app, Flags& flags) {
  CommandLine line(app, flags);
  line.add(flags, "Text");
  line.add(flags.model);
  line.add(flags.experts);
  line.add(flags, "Batch");
  line.add(flags.accumulator, "Micro-steps");
  line.add(flags, "Steps");
  line.add(flags.options, "Precision");
  line.add(flags.accumulator, "Gradients");
  line.add(flags.options, "What is computed");
  add_injection(app, flags);
  line.add(flags.options, "Limits");
  add_nvme(app, flags.fit);
  line.add(flags.options, "Away from the device");
  line.add(flags.state);
  line.add(flags, "Ranks");
  line.add(flags.options, "What is sharded");
  line.add(flags, "Run");
  line.add(flags.profile);
  line.add(flags.simulation, "", "With --communicator simulated");
  add_checkpointing(app, flags.checkpointing);
  // What the library's line does not have.
  const auto say_more = [&](const char* flag, const char* more) {
    CLI::Option* option = app.get_option(flag);
    option->description(option->get_description() + more);
  };
  say_more("--clip-norm", "; 0: any");
  say_more("--communicator",
           "; simulated: none, steps run without values and count what they send");
  say_more("--world-invariant", "; one thread a rank unless --threads says more");
}

// The same as add_flags().
template <typename S>
void write_flags(const S& options, const OwnForms& forms, nlohmann::json& json) {
  zeropage::memory::for_each_section<S>([&](const auto& section) {
    for_each_flag(section, options, [&](const auto& field, const auto& in) {
      if (write_own_form(field.text, forms, json)) return;
      json[std::string(field.text.flag.name)] = flag_json(field, in);
    });
  });
}

// The batch's sizes of which the command line tells some.
void solve_batch(const CLI::App& app, Flags& flags) {
  if (flags.global_batch == 0) return;
  const auto given = [&](const char* flag, int64_t value) {
    return app.get_option(flag)->count() > 0 ? std::optional<int64_t>(value) : std::nullopt;
  };
  const bool launched = zeropage::comm::launched_by_environment();
  zeropage::accumulate::BatchSizes sizes{
      .global_batch = flags.global_batch,
      .micro_batch = given("--batch", flags.batch),
      .accumulation = given("--accumulate", flags.accumulator.micro_steps),
      .ranks = (launched ? zeropage::comm::read_place().world_size : flags.ranks) /
               flags.ranks_of_sample()};
  if (!sizes.micro_batch && !sizes.accumulation) sizes.micro_batch = flags.batch;
  try {
    const auto solved = zeropage::accumulate::solve_batch(sizes);
    flags.batch = solved.micro_batch;
    flags.accumulator.micro_steps = solved.accumulation;
  } catch (const std::exception& error) {
    throw CLI::ValidationError("--global-batch: " + zeropage::memory::message_of(error));
  }
}

// What limits of memory leave as it is.
void note_what_is_given(const CLI::App& app, Flags& flags) {
  if (app.get_option("--stage")->count() > 0) {
    flags.fit.stage = std::stoi(text_of(flags.options.stage));
  }
  flags.fit.has_policy = app.get_option("--checkpoint-activations")->count() > 0;
}

}  // namespace

torch::DeviceType Flags::device_type() const {
  // Asking CUDA itself would initialise it, and then no rank could be forked.
  const bool has_cuda = zeropage::memory::has_cuda_driver();
  return device == "cuda" || (device == "auto" && has_cuda && !simulates()) ? torch::kCUDA
                                                                            : torch::kCPU;
}

zeropage::parallel::ScheduleKind Flags::schedule_kind() const {
  using zeropage::parallel::ScheduleKind;
  if (schedule == "gpipe") return ScheduleKind::kGPipe;
  if (schedule == "interleaved") return ScheduleKind::kInterleaved;
  return schedule == "zero-bubble" ? ScheduleKind::kZeroBubble
                                   : ScheduleKind::kOneForwardOneBackward;
}

int64_t hidden_of_experts(const Flags& flags) {
  const ExpertFlags& experts = flags.experts;
  return experts.hidden > 0 ? experts.hidden : 4 * flags.model.d_model / experts.active;
}

nlohmann::json Flags::to_json() const {
  nlohmann::json json = {{"checkpoint-activations", checkpointing.text},
                         {"tiled-mlp", checkpointing.tiles_mlps},
                         {"offload-activations", checkpointing.offload_text},
                         {"nvme", fit.nvme_directory},
                         {"nvme-size", fit.nvme_bytes}};
  write_flags(*this, forms, json);
  write_flags(model, forms, json);
  write_flags(experts, forms, json);
  write_flags(accumulator, forms, json);
  write_flags(options, forms, json);
  write_flags(state, forms, json);
  write_flags(profile, forms, json);
  if (simulates()) write_flags(simulation, forms, json);
  json["page-bytes"] = zeropage::page_bytes_on(device_type(), options);
  // What it comes to is in --batch and --accumulate.
  json.erase("global-batch");
  return json;
}

std::optional<int> parse_flags(int argc, char** argv, Flags& flags) {
  CLI::App app(
      "Trains a small GPT on text, sharded over ranks, and reports speed, memory and losses.\n"
      "Starts its own ranks on this host (--ranks), unless a launcher did: torchrun, srun, mpirun, "
      "zp run.");
  app.get_formatter()->column_width(36);
  app.option_defaults()->always_capture_default()->multi_option_policy(
      CLI::MultiOptionPolicy::TakeLast);
  add_flags(app, flags);
  try {
    app.parse(argc, argv);
    solve_batch(app, flags);
    check_flags(app, flags);
    note_what_is_given(app, flags);
    if (flags.experts.any()) flags.experts.hidden = hidden_of_experts(flags);
    apply_own_forms(flags);
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
    return 0;
  } catch (const CLI::ParseError& error) {
    std::cerr << "train_gpt: " << error.what() << " (train_gpt --help lists the flags)\n";
    return examples::kUsageError;
  } catch (const std::exception& error) {
    std::cerr << "train_gpt: " << zeropage::memory::message_of(error) << '\n';
    return examples::kUsageError;
  }
  return std::nullopt;
}

}  // namespace train_gpt
