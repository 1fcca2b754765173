// Times collectives between the ranks of this host over every transport, interleaved.
// collectives --help.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <nlohmann/json.hpp>
#include <torch/version.h>

#include "bench/collectives/flags.h"
#include "bench/collectives/team.h"
#include "bench/interleaved.h"
#include "bench/json_file.h"
#include "bench/measuring_main.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"
#include "zeropage/launcher.h"
#include "zeropage/ledger.h"

namespace collectives {
namespace {

using bench::Spread;

constexpr auto kDeadline = std::chrono::seconds(60);
constexpr const char* kLine = "%-15s %10s  %-7s %10s %11s  %-22s %s\n";

// For people: stdout, unless that is for the JSON.
FILE* text_of(const Flags& flags) {
  return flags.json == "-" ? stderr : stdout;
}

template <typename... Values>
std::string formatted(const char* format, Values... values) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), format, values...);
  return text.data();
}

std::string ratio_text(const Spread& ratio) {
  return formatted("%.2f [%.2f, %.2f]", ratio.median(), ratio.least(), ratio.most());
}

// Over each transport.
nlohmann::json report(const Case& measured, const std::vector<std::string>& transports,
                      const std::vector<Spread>& seconds, FILE* text) {
  nlohmann::json rows;
  const bool has_bytes = measured.bytes > 0;
  for (size_t i = 0; i < transports.size(); ++i) {
    nlohmann::json row = {{"operation", name(measured.operation)},
                          {"bytes", measured.bytes},
                          {"transport", transports[i]},
                          {"seconds", spread_json(seconds[i])}};
    const auto ratio_to = [&](const std::string& other) -> std::string {
      const auto at = std::find(transports.begin(), transports.end(), other);
      if (at == transports.end() || other == transports[i]) return "-";
      const Spread ratio =
          quotient(seconds[i], seconds[static_cast<size_t>(at - transports.begin())]);
      row["time_to_" + other] = spread_json(ratio);
      return ratio_text(ratio);
    };
    const double median = seconds[i].median();
    const double gigabytes = static_cast<double>(measured.bytes) * 1e-9 / median;
    const std::string size = has_bytes ? zeropage::memory::format_bytes(measured.bytes) : "";
    std::fprintf(text, kLine, name(measured.operation), size.c_str(), transports[i].c_str(),
                 formatted("%.1f us", median * 1e6).c_str(),
                 has_bytes ? formatted("%.3f GB/s", gigabytes).c_str() : "",
                 ratio_to("gloo").c_str(), ratio_to("c10d").c_str());
    rows.push_back(row);
  }
  std::fflush(text);
  return rows;
}

// What rank 0 does.
void drive(Team& team, const Flags& flags) {
  FILE* const text = text_of(flags);
  nlohmann::json json = {
      {"ranks", team.size()}, {"rounds", flags.rounds}, {"libtorch", TORCH_VERSION}};
  std::fprintf(text, "%d ranks, %d rounds; median, ratios within a round: median [least, most]\n",
               team.size(), flags.rounds);
  for (const Absent& absent : team.absent()) {
    std::fprintf(text, "%s is absent: %s\n", absent.transport.c_str(), absent.reason.c_str());
    json["absent"][absent.transport] = absent.reason;
  }
  std::fprintf(text, kLine, "operation", "tensor", "over", "time", "bandwidth", "time / gloo's",
               "time / c10d's");
  for (const Case& measured : cases(flags)) {
    std::vector<bench::TimedContender> contenders;
    for (size_t transport = 0; transport < team.transports().size(); ++transport) {
      team.verify(measured, transport);
      contenders.push_back(
          {team.transports()[transport], [&team, measured, transport](int64_t runs) {
             return team.time(measured, transport, runs);
           }});
    }
    const auto seconds = time_interleaved(contenders, flags.rounds);
    for (auto& row : report(measured, team.transports(), seconds, text)) {
      json["measurements"].push_back(std::move(row));
    }
  }
  team.dismiss();
  bench::write_json(flags.json, json);
}

// What each rank's process does.
int take_part(const Flags& flags) {
  // More threads than cores would measure the scheduler.
  at::set_num_threads(1);
  const zeropage::comm::Place place = zeropage::comm::read_place();
  zeropage::memory::Ledger::process()->set_owner(
      c10::str("rank ", place.rank, "/", place.world_size));
  Team team(place, zeropage::comm::open_store(place, kDeadline), flags);
  if (team.rank() == 0) {
    drive(team, flags);
  } else {
    team.follow();
  }
  return 0;
}

void measure(const Flags& flags) {
  const int failed = zeropage::comm::launch_function(
      [&] { return take_part(flags); },
      {.ranks = flags.ranks, .output = zeropage::comm::LaunchOptions::Output::kRankZeroBare});
  ZP_CHECK(failed == 0, flags.ranks, " ranks: a rank failed; it says why above");
}

}  // namespace
}  // namespace collectives

int main(int argc, char** argv) {
  collectives::Flags flags;
  CLI::App app(
      "Times collectives between the ranks of this host: ours over shared memory and Gloo, "
      "and c10d's ProcessGroupGloo, interleaved.");
  collectives::add_flags(app, flags);
  return bench::parse_and_measure("collectives", app, argc, argv,
                                  [&] { collectives::measure(flags); });
}
