#include "zero/option_fields.h"

namespace zeropage {

std::vector<std::string> describe(const Options& options) {
  Options by_new_names = options;
  by_new_names.minimum_sharded_bytes = minimum_sharded_bytes(options);
  std::vector<std::string> lines;
  memory::describe_fields("options.", by_new_names, lines);
  return lines;
}

}  // namespace zeropage
