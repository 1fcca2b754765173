// A subcommand of zp: a class that adds itself to the parser and runs when it was chosen.
#pragma once

#include <string>
#include <vector>

namespace zeropage::tools {

class Subcommand {
 public:
  virtual ~Subcommand() = default;
  virtual bool chosen() const = 0;
  // `after_dashes`: the first "--" of the command line and all behind it, or nothing. Returns zp's
  // exit code; throws std::invalid_argument for a command line that makes no sense.
  virtual int run(const std::vector<std::string>& after_dashes) const = 0;
};

}  // namespace zeropage::tools
