#include "zero/options.h"

#include "memory/check.h"

namespace zeropage {

void validate(const Options& options) {
  const int stage = static_cast<int>(options.stage);
  ZP_CHECK(stage >= 0 && stage <= 3, "options.stage: expected 0, 1, 2 or 3, got ", stage);
  ZP_CHECK(
      options.stage != Stage::kGradients && options.stage != Stage::kParameters,
      "options.stage: stage ", stage,
      options.stage == Stage::kGradients ? " (sharded gradients)" : " (sharded parameters)",
      " is not in this version of Zeropage; use 0 (replicated) or 1 (sharded optimizer state)");
  ZP_CHECK(options.page_bytes >= memory::operator""_KiB(4),
           "options.page_bytes: expected at least 4 KiB, got ", options.page_bytes,
           " bytes; smaller pages are all messages");
}

std::vector<std::string> describe(const Options& options) {
  return {c10::str("options.stage: ", static_cast<int>(options.stage)),
          c10::str("options.broadcast_buffers: ", options.broadcast_buffers),
          c10::str("options.page_bytes: ", options.page_bytes)};
}

}  // namespace zeropage
