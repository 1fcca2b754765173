// The table of LaunchOptions (zeropage/fields.h). The flags are those of `zp run`.
#pragma once

#include "zeropage/fields.h"
#include "zeropage/launcher.h"

namespace zeropage::comm {

constexpr auto words_of(std::type_identity<LaunchOptions::Output>) {
  using memory::word;
  return std::array{word<LaunchOptions::Output::kPrefixAll>("prefix all"),
                    word<LaunchOptions::Output::kRankZeroBare>("bare rank 0")};
}

constexpr auto table_of(std::type_identity<LaunchOptions>) {
  using memory::Bounds, memory::field;
  return std::tuple(memory::section(
      "Local ranks",
      field<&LaunchOptions::ranks>({.help = "Ranks to start, 1 to 4096",
                                    .flag = {"ranks", "N"},
                                    .bounds = Bounds::range(1, 4096)}),
      field<&LaunchOptions::output>(
          {.help = "Whether rank 0's lines get a prefix too, or rank 0 has the terminal",
           .flag = {.name = "bare-rank-zero",
                    .help = "Leave the terminal to rank 0; only the others' lines get a prefix"}}),
      field<&LaunchOptions::grace>(
          {.help = "Time the other ranks get to end by themselves after one failed",
           .flag = {"grace", "SECONDS"}}),
      field<&LaunchOptions::tail_lines>(
          {.help = "Last lines of each rank that are kept for the report", .unit = "lines"}),
      field<&LaunchOptions::restarts>(
          {.help = "Times that ranks are started again after one failed, 0 to 1000",
           .flag = {"restarts", "N"},
           .bounds = Bounds::range(0, 1000)}),
      field<&LaunchOptions::copies_in>(
          {.help = "Where ranks that are started again find copies of the training state",
           .flag = {"copies-in", "DIR"}})));
}
static_assert(memory::tells_all_fields<LaunchOptions>());

}  // namespace zeropage::comm
