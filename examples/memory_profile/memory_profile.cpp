// Where the bytes of a step go: a GPT, a ResNet-18 and an LSTM at every stage, with activations kept and
// recomputed, in one table and one page. memory_profile --help.
#include <cstdio>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <zeropage/check.h>
#include <zeropage/launcher.h>
#include <zeropage/profile.h>
#include <zeropage/profiler.h>
#include <zeropage/zeropage.h>

#include "command_line/command_line.h"
#include "memory_profile/cases.h"
#include "memory_profile/table.h"
#include "output_files/output_files.h"

namespace {

struct Flags {
  int ranks = 2;
  std::vector<std::string> models = memory_profile::model_names();
  std::string page;
  std::string profile;
};

int run(zeropage::World& world, const Flags& flags) {
  torch::set_num_threads(1);
  const std::vector<memory_profile::Case> cases = memory_profile::cases_of(flags.models);
  zeropage::profile::Profiler profiler(
      world, {.first_step = 0,
              .last_step = static_cast<int64_t>(cases.size()) - 1,
              .title = "Three models at every stage, activations kept and recomputed"});
  profiler.note("ranks", std::to_string(world.size()));
  profiler.note("optimizer", "AdamW");
  for (size_t index = 0; index < cases.size(); ++index) {
    cases[index].run(world, profiler, static_cast<int64_t>(index));
    if (world.rank() == 0) std::cerr << '.' << std::flush;
  }
  const zeropage::profile::Profile profile = profiler.join();
  if (world.rank() == 0) std::cout << '\n' << memory_profile::table(profile) << std::flush;
  profiler.write({.page = flags.page, .profile = flags.profile, .trace = {}});
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Trains a GPT, a ResNet-18 and an LSTM for three steps at each stage, with activations kept "
      "and "
      "recomputed, and shows the bytes of the third step.");
  Flags flags;
  app.option_defaults()->always_capture_default();
  app.add_option("--ranks", flags.ranks, "Local ranks, unless a launcher started this one")
      ->check(CLI::Range(1, 64));
  app.add_option("--models", flags.models, "Models to profile")
      ->delimiter(',')
      ->check(CLI::IsMember(memory_profile::model_names()))
      ->type_name("NAME[,NAME]");
  app.add_option("--page", flags.page, "Write NAME.html")->type_name("NAME.html");
  app.add_option("--profile", flags.profile, "Write NAME.json, for zp report")
      ->type_name("NAME.json");
  if (const std::optional<int> ended = examples::parse(app, argc, argv)) return *ended;
  const std::string error =
      zeropage::profile::check_names({.page = flags.page, .profile = flags.profile, .trace = {}});
  if (!error.empty()) {
    std::fprintf(stderr, "memory_profile: %s\n", error.c_str());
    return examples::kUsageError;
  }
  const auto run_rank = [&](zeropage::World& world) { return run(world, flags); };
  try {
    examples::check_outputs({{"--page", flags.page}, {"--profile", flags.profile}});
    if (zeropage::launched_by_environment()) {
      auto world = zeropage::World::from_environment();
      return run_rank(world);
    }
    return zeropage::World::launch(
        flags.ranks, run_rank, {},
        {.output = zeropage::comm::LaunchOptions::Output::kRankZeroBare});
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "memory_profile: %s\n", zeropage::memory::message_of(failure).c_str());
    return 1;
  }
}
