// How long ranks take to meet: processes that are forked from one which has loaded the libraries, from their first call to the last
// rank's end of it. start_up --help.
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "bench/json_file.h"
#include "bench/measuring_main.h"
#include "zeropage/bytes.h"
#include "zeropage/zeropage.h"

namespace {

using Clock = std::chrono::steady_clock;
using zeropage::comm::World;

struct Flags {
  int ranks = 64;
  int ranks_per_host = 0;  // 0: all
  int rounds = 20;
  int64_t deadline_s = 120;
  std::string json;
};

// By the clock that all processes of a host share, in seconds.
double now() {
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

// From the first rank's begin to the last one's end. Collective.
template <typename Call>
double seconds_of(const World& world, const Call& call) {
  world.communicator().barrier("a measurement").wait();
  const double began = now();
  call();
  return world.max(now()) - world.min(began);
}

int measure_in_rank(const Flags& flags) {
  const double began = now();
  zeropage::comm::Place place = zeropage::comm::read_place();
  if (flags.ranks_per_host > 0) {
    place.host = "host " + std::to_string(place.rank / flags.ranks_per_host);
    place.local_rank = place.rank % flags.ranks_per_host;
    place.local_world_size = flags.ranks_per_host;
  }
  const zeropage::comm::WorldOptions options{.deadline = std::chrono::seconds(flags.deadline_s)};
  const World world(place, zeropage::comm::open_store(place, options.deadline), options);
  const double meeting = world.max(now()) - world.min(began);
  const bool prints = world.rank() == 0;
  if (prints) {
    std::printf("%d ranks met in %.2f s\n", world.size(), meeting);
    std::fflush(stdout);
  }
  const auto each = [&](const std::function<void()>& round) {
    const double seconds = seconds_of(world, [&] {
      for (int i = 0; i < flags.rounds; ++i) round();
    });
    return seconds / flags.rounds;
  };
  const double gather =
      each([&] { world.gather_text("a text of 40 bytes", std::string(40, 'x')); });
  const double agreement =
      each([&] { world.check_agreement("the model", {std::string(40, 'x')}); });
  const double split =
      seconds_of(world, [&] { static_cast<void>(world.split(world.rank() % 2, 0)); });
  const double resident = world.max(static_cast<double>(zeropage::memory::resident_bytes()));
  if (!prints) return 0;
  constexpr double kMsPerSecond = 1e3;
  constexpr double kMiB = 1 << 20;
  std::printf(
      "a gather of texts of 40 bytes: %.1f ms\nan agreement: %.1f ms\na split in two: %.2f s\n",
      gather * kMsPerSecond, agreement * kMsPerSecond, split);
  std::printf("largest resident set: %.0f MiB\n", resident / kMiB);
  bench::write_json(flags.json, {{"ranks", world.size()},
                                 {"ranks_per_host", flags.ranks_per_host},
                                 {"meeting_s", meeting},
                                 {"gather_s", gather},
                                 {"agreement_s", agreement},
                                 {"split_s", split},
                                 {"resident_bytes", resident}});
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app("How long ranks of one host take to meet, and to exchange texts.");
  app.add_option("--ranks", flags.ranks, "Processes")
      ->check(CLI::Range(2, 4096))
      ->capture_default_str();
  app.add_option("--ranks-per-host", flags.ranks_per_host,
                 "Ranks that take each other for ranks of one host; 0: all")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--rounds", flags.rounds, "Gathers of texts, and as many agreements")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--deadline", flags.deadline_s, "WorldOptions::deadline, seconds")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--json", flags.json, "Writes the figures to this file");
  int status = 0;
  const int parsed = bench::parse_and_measure("start_up", app, argc, argv, [&] {
    ZP_CHECK(flags.ranks_per_host == 0 || flags.ranks % flags.ranks_per_host == 0,
             "--ranks-per-host ", flags.ranks_per_host, ": expected a divisor of ", flags.ranks,
             " ranks");
    status = zeropage::comm::launch_function([&] { return measure_in_rank(flags); },
                                             {.ranks = flags.ranks});
  });
  return parsed != 0 ? parsed : status;
}
