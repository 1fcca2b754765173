#include "zero/setup/memory_limits.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "memory/device_memory.h"
#include "zero/setup/memory_need.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"
#include "zeropage/device.h"
#include "zeropage/ledger.h"

namespace zeropage::zero {
namespace {

using memory::Breakdown;
using memory::format_bytes;
using memory::Kind;
using memory::MemoryLimits;
using memory::MemoryShortage;
using memory::Tier;

// "" if it fits.
std::string past(const char* memory, const char* option, const std::string& what, int64_t needed,
                 int64_t limit) {
  if (limit == MemoryLimits::kNone || needed <= limit) return "";
  return c10::str(what, " needs ", format_bytes(needed), " of ", memory,
                  " memory a rank before any activation, ", format_bytes(needed - limit),
                  " more than the ", format_bytes(limit), " that options.", option,
                  " leaves it; raise it, or choose a setting that fits by zeropage::fit "
                  "(zeropage/fit.h)\n");
}

}  // namespace

MemoryLimits limits_of(const comm::World& world, const Options& options) {
  // A share of less than a byte is not "no limit".
  const int64_t share = options.host_memory_bytes / world.local_size();
  return {.device_bytes = options.device_memory_bytes,
          .device = world.device().type(),
          .host_bytes = options.host_memory_bytes == Options::kNoLimit
                            ? MemoryLimits::kNone
                            : std::max<int64_t>(1, share)};
}

void check_limits_hold(const comm::World& world, const Options& options, const std::string& what,
                       const memory::TierBytes& need, int64_t transient_bytes) {
  const MemoryLimits limits = limits_of(world, options);
  if (!limits.any()) return;
  const int64_t on_device = need[Tier::kDevice].total() + transient_bytes;
  const int64_t on_host =
      need[Tier::kHost].total() + (world.device().is_cpu() ? on_device : int64_t{0});
  std::string own = past("device", "device_memory_bytes", what, on_device, limits.device_bytes) +
                    past("host", "host_memory_bytes", what, on_host, limits.host_bytes);
  if (!own.empty()) {
    Breakdown shown = need[Tier::kDevice];
    shown[Kind::kStaging] += transient_bytes;
    own += memory::memory_table(
        std::vector<memory::MemoryColumn>{{"device", shown, need[Tier::kDevice].total()},
                                          {"host", need[Tier::kHost], need[Tier::kHost].total()}});
  }
  throw_alike(world, "the limits of memory", own);
}

std::shared_ptr<memory::MemoryLimitScope> limit_memory(const comm::World& world, LimitedModel model,
                                                       std::shared_ptr<StepFacts> facts,
                                                       int64_t held_bytes) {
  const auto expected = memory::Ledger::current()->expected();
  // It is of another run.
  if (expected && expected->options != describe(model.options)) {
    memory::Ledger::current()->expect(std::nullopt);
  }
  model.device_is_host = world.device().is_cpu();
  model.limits = limits_of(world, model.options);
  MemoryLimits limits = model.limits;
  if (world.device().is_cuda() && limits.device_bytes != MemoryLimits::kNone) {
    // LibTorch's allocator tells of a block when it has it, so it has to hold the limit itself.
    memory::limit_cuda_memory(world.device(), limits.device_bytes,
                              memory::device_memory(world.device()).total_bytes);
    limits.device_bytes = MemoryLimits::kNone;
  }
  auto scope = std::make_shared<memory::MemoryLimitScope>(
      memory::Ledger::current(), limits,
      [model = std::move(model), facts](const MemoryShortage& shortage) {
        return advice_on_memory(model, facts->now(), shortage);
      });
  facts->note_besides(
      std::max<int64_t>(0, scope->begin_activations(world.device().type()) - held_bytes));
  return scope;
}

}  // namespace zeropage::zero
