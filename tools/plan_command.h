// `zp plan`: hands its command line to zp-plan, which lies beside zp and needs LibTorch
// (tools/plan/zp_plan.cpp).
#pragma once

#include <CLI/CLI.hpp>

#include "tools/subcommand.h"

namespace zeropage::tools {

class PlanCommand : public Subcommand {
 public:
  explicit PlanCommand(CLI::App& zp);

  bool chosen() const override { return parser_->parsed(); }
  // Returns only where zp-plan cannot be started, by a std::system_error.
  int run(const std::vector<std::string>& after_dashes) const override;

 private:
  CLI::App* parser_;
};

}  // namespace zeropage::tools
