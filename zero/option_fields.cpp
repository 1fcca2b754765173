#include "zeropage/option_fields.h"

namespace zeropage {

std::vector<std::string> describe(const Options& options) {
  std::vector<std::string> lines;
  memory::describe_fields("options.", options, lines);
  return lines;
}

}  // namespace zeropage
