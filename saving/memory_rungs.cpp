#include <c10/util/StringUtil.h>

#include "zeropage/check.h"
#include "zeropage/survive.h"

namespace zeropage {
namespace {

using checkpointing::RecomputeOptions;

constexpr int kMostRungs = 30;
constexpr int kRungsOfRecompute = 2;

// All of each block but its input; cheap operators where there are no blocks.
MemoryRung least_kept(const torch::nn::Module& module) {
  try {
    checkpointing::ModuleBlocks blocks = checkpointing::find_blocks(module);
    std::string words = c10::str(blocks.to_string(), " are computed again from their inputs");
    return {.recompute = RecomputeOptions::by_blocks(std::move(blocks)), .words = std::move(words)};
  } catch (const c10::Error&) {
    return {.recompute = RecomputeOptions::selective(),
            .words = "cheap operators are computed again"};
  }
}

}  // namespace

MemoryRung memory_rung(const torch::nn::Module& module, int rung) {
  ZP_CHECK(rung >= 0 && rung <= kMostRungs, "memory_rung: expected a rung from 0 to ", kMostRungs,
           ", got ", rung);
  if (rung == 0) return {.words = "all is kept"};
  if (rung == 1) {
    return {.recompute = RecomputeOptions::selective(),
            .words = "cheap operators are computed again"};
  }
  MemoryRung result = least_kept(module);
  result.parts = int64_t{1} << (rung - kRungsOfRecompute);
  if (result.parts > 1) result.words += c10::str(", micro-batches are cut into ", result.parts);
  return result;
}

}  // namespace zeropage
