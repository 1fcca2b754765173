// What the user chooses about sharding.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "memory/bytes.h"

namespace zeropage {

// What is sharded over ranks (Rajbhandari et al. 2020, "ZeRO", section 5). Bytes a rank for P fp32
// parameters, Adam and N ranks: 16 P at kReplicated, 8 P + 8 P / N at kOptimizerState.
enum class Stage : uint8_t {
  kReplicated = 0,
  kOptimizerState = 1,
  kGradients = 2,
  kParameters = 3,
};

struct Options {
  // ---- what is computed where ----

  Stage stage = Stage::kOptimizerState;

  // In training mode, forward begins by taking rank 0's buffers (running means), as PyTorch's DDP
  // does. Costs a broadcast of all buffers a forward; nothing for a module without buffers.
  bool broadcast_buffers = true;

  // ---- memory and speed, never results ----

  // Parameters are grouped into pages of about this size; a gradient is reduced as soon as its page
  // is complete. Smaller pages overlap more of backward and cost more messages. A parameter is
  // never split.
  int64_t page_bytes = memory::operator""_MiB(16);
};

// Throws for a stage or a value that this version cannot do.
void validate(const Options& options);

// The options as lines "field: value", for comparing ranks.
std::vector<std::string> describe(const Options& options);

}  // namespace zeropage
