// zp report: a profile as a page, for Perfetto, or in the terminal; two profiles against each other.
#pragma once

#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "tools/subcommand.h"

namespace zeropage::tools {

class ReportCommand : public Subcommand {
 public:
  explicit ReportCommand(CLI::App& zp);
  bool chosen() const override { return parser_->parsed(); }
  // 0; 1 for a file that is no profile, or that cannot be written.
  int run(const std::vector<std::string>& after_dashes) const override;

 private:
  CLI::App* parser_;
  std::string file_;
  std::string other_;
  std::vector<std::string> outputs_;
};

}  // namespace zeropage::tools
