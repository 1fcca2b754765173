#include "model_parallel/flags.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <optional>

#include <CLI/CLI.hpp>
#include <zeropage/schedule_fields.h>

#include "command_line/command_line.h"

namespace model_parallel {
namespace {

using zeropage::parallel::ScheduleKind;

// What the parser cannot see by itself; empty if nothing is wrong.
std::string refusal(const Flags& flags) {
  if (flags.ranks < 2) {
    return "--ranks 1: expected 2 or more, since the model is to be cut; one rank is measured "
           "anyway";
  }
  for (const int64_t split : flags.split_sizes) {
    if (split >= flags.batch || flags.batch % split != 0) {
      return "--split-sizes " + std::to_string(split) + ": expected a divisor of --batch " +
             std::to_string(flags.batch) + " that is smaller; the whole batch is the naive way";
    }
    if (split == 1 && flags.image_side <= 32) {
      return "--split-sizes 1: the last blocks would normalise a single value, since 32 pixels "
             "become one; "
             "give a larger --image-side";
    }
    try {
      zeropage::parallel::make_schedule(flags.schedule)
          ->actions(flags.ranks, static_cast<int>(flags.batch / split));
    } catch (const std::invalid_argument& error) {
      return "--split-sizes " + std::to_string(split) + ": " + error.what();
    }
  }
  if (!flags.drawn.empty() && !flags.json.empty()) {
    return "--draw measures nothing, so there is nothing for --json; leave one out";
  }
  return "";
}

}  // namespace

Flags read_flags(int argc, char** argv) {
  Flags flags;
  std::string schedule = "gpipe";
  CLI::App app("ResNet-50 over two ranks or more: one rank, naive, and pipelined by split size");
  app.option_defaults()->always_capture_default();
  app.add_option("--ranks", flags.ranks, "Ranks that the model is cut over")
      ->check(CLI::Range(1, 16));
  app.add_option("--threads", flags.threads, "Threads of a rank")->check(CLI::Range(1, 1024));
  app.add_option("--schedule", schedule, "Schedule of the pipelined steps")
      ->check(CLI::IsMember({"gpipe", "1f1b"}));
  app.add_option("--batch", flags.batch, "Images of a step")->check(CLI::Range(2, 1 << 16));
  app.add_option("--split-sizes", flags.split_sizes, "Images of a micro-batch, divisors of --batch")
      ->delimiter(',')
      ->check(examples::positive());
  app.add_option("--image-side", flags.image_side, "pixels")->check(CLI::Range(32, 1024));
  app.add_option("--width", flags.width, "Channels of the first stage; 64 is ResNet-50")
      ->check(CLI::Range(1, 4096));
  app.add_option("--classes", flags.classes)->check(examples::positive());
  app.add_option("--steps", flags.steps, "Steps that are measured, after one that is not")
      ->check(examples::positive());
  app.add_option("--rounds", flags.rounds, "Rounds, each of which measures every way once")
      ->check(examples::positive());
  app.add_option("--seed", flags.seed, "Seed of weights and images");
  app.add_option("--json", flags.json, "File for the figures");
  app.add_option("--svg", flags.svg, "File for the chart");
  app.add_option("--draw", flags.drawn,
                 "Files of --json, or of bench/peers/model_parallel.py, to show beside each other; "
                 "nothing is measured")
      ->delimiter(',');
  if (const std::optional<int> ended = examples::parse(app, argc, argv)) std::exit(*ended);
  for (const auto& known : words_of(std::type_identity<ScheduleKind>())) {
    if (known.word == schedule) flags.schedule = known.value;
  }
  const std::string words = refusal(flags);
  if (!words.empty()) {
    std::fprintf(stderr, "model_parallel: %s\n", words.c_str());
    std::exit(examples::kUsageError);
  }
  return flags;
}

}  // namespace model_parallel
