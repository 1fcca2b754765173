// `zp schedule`: what a schedule of a pipeline costs, simulated from the list of actions that runs, or as a run measured it; and its picture.
#pragma once

#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "pipeline/schedule/simulation.h"
#include "tools/subcommand.h"
#include "zeropage/schedule.h"

namespace zeropage::tools {

class ScheduleCommand : public Subcommand {
 public:
  explicit ScheduleCommand(CLI::App& zp);

  bool chosen() const override { return parser_->parsed(); }
  int run(const std::vector<std::string>& after_dashes) const override;

 private:
  int chunks() const;
  // Seconds of a chunk, which is one part of what a rank has.
  pipeline::StageSeconds seconds() const;

  CLI::App* parser_;
  int ranks_ = 0;
  int micro_batches_ = 0;
  int chunks_ = 0;  // 0: as many as the schedule needs at least
  std::string schedule_ = "1f1b";
  std::vector<double> durations_ = {1, 1, 1};
  double transfer_s_ = 0;
  std::string times_file_;
  std::string picture_file_;
  bool json_ = false;
};

}  // namespace zeropage::tools
