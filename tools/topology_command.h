// `zp topology`: what this machine has for ranks, which cores each gets, and whether memory lies
// where it should.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "tools/subcommand.h"

namespace zeropage::tools {

class TopologyCommand : public Subcommand {
 public:
  explicit TopologyCommand(CLI::App& zp);

  bool chosen() const override { return parser_->parsed(); }
  int run(const std::vector<std::string>& after_dashes) const override;

 private:
  CLI::App* parser_;
  int ranks_ = 0;  // 0: as many as a launcher says
  int64_t buffer_mebibytes_ = 64;
  bool json_ = false;
};

}  // namespace zeropage::tools
