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

namespace zeropage {
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

// How many states the optimizer has, by what it holds.
int64_t states_held(const BytePlan& plan, const MemoryShortage& shortage) {
  const memory::TierBytes one = plan.states(1);
  const int64_t of_one = one[Tier::kDevice].total() + one[Tier::kHost].total();
  if (of_one == 0) return 0;
  const int64_t held =
      shortage.on_device[Kind::kOptimizerState] + shortage.on_host[Kind::kOptimizerState];
  return (held + of_one - 1) / of_one;
}

class Changes {
 public:
  Changes(const std::vector<PageLayout>& layouts, int rank, int ranks, bool device_is_host,
          const MemoryShortage& shortage)
      : layouts_(layouts),
        rank_(rank),
        ranks_(ranks),
        device_is_host_(device_is_host),
        shortage_(shortage) {}

  void try_options(const std::string& change, const Options& from, const Options& to) {
    try {
      validate(to);
      const BytePlan before(layouts_, from, rank_, ranks_);
      const BytePlan after(layouts_, to, rank_, ranks_);
      const int64_t states = states_held(before, shortage_);
      const int64_t transient =
          before.transient_bytes() - after.transient_bytes() + gradients_saved(before, after);
      add(change, held(before.held(states)) - held(after.held(states)) +
                      (device_is_host_ || !shortage_.is_of_host ? transient : 0));
    } catch (const c10::Error&) {
      // These options do not go together, so they are no advice.
    }
  }
  void add(const std::string& change, int64_t saved_bytes) {
    if (saved_bytes < shortage_.missing_bytes || found_ == kMostChanges) return;
    ++found_;
    lines_ += c10::str("  ", change, ": ", format_bytes(saved_bytes), " less\n");
  }
  const std::string& lines() const { return lines_; }

 private:
  static constexpr int kMostChanges = 3;

  // In the memory that has run out.
  int64_t held(const memory::TierBytes& bytes) const {
    const bool counts_device = device_is_host_ || !shortage_.is_of_host;
    const bool counts_host = device_is_host_ || shortage_.is_of_host;
    return (counts_device ? bytes[Tier::kDevice].total() : 0) +
           (counts_host ? bytes[Tier::kHost].total() : 0);
  }

  // Bytes that are saved of the gradients that were there: a forward that runs out of memory has none.
  int64_t gradients_saved(const BytePlan& before, const BytePlan& after) const {
    return std::min(before.gradient_bytes() - after.gradient_bytes(),
                    shortage_.on_device[Kind::kGradient]);
  }

  const std::vector<PageLayout>& layouts_;
  const int rank_;
  const int ranks_;
  const bool device_is_host_;
  const MemoryShortage& shortage_;
  std::string lines_;
  int found_ = 0;
};

Options at_stage(const Options& options, int stage) {
  Options changed = options;
  changed.stage = stage_of(stage);
  return changed;
}

Options offloaded(const Options& options, Tier tier) {
  Options changed = options;
  changed.offload.optimizer = tier;
  if (tier == Tier::kNvme) {
    changed.stage = Stage::kParameters;
    changed.offload.parameters = tier;
    if (changed.offload.nvme_directory.empty()) changed.offload.nvme_directory = "DIR";
  }
  return changed;
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

std::string cheapest_changes(const Options& options, const std::vector<PageLayout>& layouts,
                             int rank, int ranks, bool device_is_host,
                             const MemoryShortage& shortage) {
  Changes changes(layouts, rank, ranks, device_is_host, shortage);
  // A stage that the options have already saves nothing.
  for (int stage = 1; stage <= 2; ++stage) {
    changes.try_options(c10::str("stage ", stage), options, at_stage(options, stage));
  }
  // A region keeps its inputs alone, and the largest is there while it is repeated.
  constexpr int64_t kLeftOfActivations = 4;
  const int64_t activations = shortage.on_device.activations();
  const bool is_beside = shortage.is_of_host && !device_is_host;
  if (!is_beside) {
    changes.add("activations that are computed again (checkpointing/), about",
                activations - activations / kLeftOfActivations);
  }
  changes.try_options("stage 3", options, at_stage(options, 3));
  if (!device_is_host && !is_beside && options.offload.optimizer == Tier::kDevice) {
    changes.try_options("options.offload.optimizer on the host", options,
                        offloaded(options, Tier::kHost));
  }
  if (options.offload.parameters != Tier::kNvme) {
    changes.try_options(
        "stage 3 with options.offload.optimizer and options.offload.parameters on nvme "
        "(options.offload.nvme_directory)",
        options, offloaded(options, Tier::kNvme));
  }
  if (changes.lines().empty()) {
    return "no single change of stage, offload or recompute would have left " +
           format_bytes(shortage.missing_bytes) +
           "; use more ranks, a smaller batch or a lower precision\n";
  }
  return "what would have fitted, the cheapest first:\n" + changes.lines();
}

std::unique_ptr<memory::MemoryLimitScope> limit_memory(const comm::World& world,
                                                       const Options& options,
                                                       const std::vector<PageLayout>& layouts,
                                                       int shard_rank, int shard_ranks) {
  const bool device_is_host = world.device().is_cpu();
  MemoryLimits limits = limits_of(world, options);
  if (world.device().is_cuda() && limits.device_bytes != MemoryLimits::kNone) {
    // LibTorch's allocator tells of a block when it has it, so it has to hold the limit itself.
    memory::limit_cuda_memory(world.device(), limits.device_bytes,
                              memory::device_memory(world.device()).total_bytes);
    limits.device_bytes = MemoryLimits::kNone;
  }
  return std::make_unique<memory::MemoryLimitScope>(
      memory::Ledger::current(), limits, [=](const MemoryShortage& shortage) {
        return cheapest_changes(options, layouts, shard_rank, shard_ranks, device_is_host,
                                shortage);
      });
}

}  // namespace zeropage
