#include "zero/setup/memory_need.h"

#include <algorithm>

#include "device/device.h"
#include "device/stream.h"
#include "memory/bytes.h"
#include "memory/check.h"
#include "memory/memory_table.h"

namespace zeropage {
namespace {

using memory::format_bytes;
using memory::Kind;

// "" if it fits.
std::string shortage(const comm::World& world, const std::string& what, const MemoryNeed& need,
                     int64_t held_bytes) {
  const memory::DeviceMemory device = memory::device_memory(world.device());
  const int64_t needed = need.persistent.total() + need.transient_bytes;
  // What ranks hold already is not free, and what they are about to take is alike.
  const int sharing = world.ranks_on_device();
  const int64_t available = device.free_bytes / sharing + device.cached_bytes;
  if (needed - held_bytes <= available) return "";
  memory::Breakdown shown = need.persistent;
  shown[Kind::kStaging] += need.transient_bytes;
  return c10::str(
      what, " needs ", format_bytes(needed), " on ", world.device(),
      " before any activation, but of its ", format_bytes(device.total_bytes), " only ",
      format_bytes(available + held_bytes), " are for this process",
      sharing == 1 ? std::string() : c10::str(", as ", sharing, " ranks share what is free on it"),
      "; use more ", sharing == 1 ? "ranks" : "devices",
      ", a higher stage, smaller pages or a lower precision\n",
      memory::memory_table(
          std::vector<memory::MemoryColumn>{{"needed", shown, need.persistent.total()}}));
}

// Beside a parameter in a lower precision.
int64_t master_bytes(LowPrecisionUpdate update) {
  if (update == LowPrecisionUpdate::kMasterWeights) return sizeof(float);
  return update == LowPrecisionUpdate::kSplitMasterWeights ? sizeof(int16_t) : 0;
}

}  // namespace

MemoryNeed need_of_pages(const std::vector<PageLayout>& layouts, const Options& options,
                         int world_size, const PageOffload* page_offload) {
  MemoryNeed need;
  int64_t largest_page_bytes = 0;
  int64_t largest_bucket_bytes = 0;
  for (size_t index = 0; index < layouts.size(); ++index) {
    const PageLayout& page = layouts[index];
    const auto element_bytes = static_cast<int64_t>(c10::elementSize(page.dtype));
    const bool optimizer_leaves =
        page_offload != nullptr && page_offload->offloads_optimizer(index);
    const int64_t whole_bytes = page.padded_numel(world_size) * element_bytes;
    const int64_t shard_bytes = page.shard_numel * element_bytes;
    const bool sharded = options.stage.parameters && whole_bytes >= minimum_sharded_bytes(options);
    const bool parameters_leave =
        sharded && page_offload != nullptr && page_offload->offloads_parameters();
    if (!parameters_leave || options.offload.parameters == memory::Tier::kHost) {
      (parameters_leave ? need.host : need.persistent)[Kind::kParameter] +=
          sharded ? shard_bytes : whole_bytes;
    }
    if (sharded) largest_page_bytes = std::max(largest_page_bytes, whole_bytes);
    if (!page.requires_grad) continue;
    const auto bytes_in = [](c10::ScalarType dtype, int64_t numel) {
      return numel * static_cast<int64_t>(c10::elementSize(dtype));
    };
    const c10::ScalarType reduced = reduce_dtype_of(options, page.dtype);
    const c10::ScalarType accumulated = accumulate_dtype_of(options, page.dtype);
    const int64_t whole_numel = page.padded_numel(world_size);
    const int64_t owned_numel = options.stage.optimizer_state ? page.shard_numel : whole_numel;
    if (optimizer_leaves) need.host[Kind::kGradient] += bytes_in(accumulated, owned_numel);
    if (!optimizer_leaves || !options.stage.gradients) {
      need.persistent[Kind::kGradient] +=
          bytes_in(accumulated, options.stage.gradients ? page.shard_numel : whole_numel);
    }
    // Whole gradients travel as they lie, or as a copy in another dtype.
    if (options.stage.gradients || reduced != accumulated) {
      largest_bucket_bytes = std::max(largest_bucket_bytes, bytes_in(reduced, whole_numel));
    }
    const int64_t master = is_low_precision(page.dtype)
                               ? master_bytes(options.low_precision_update)
                               : (optimizer_leaves && !parameters_leave ? sizeof(float) : 0);
    if (optimizer_leaves && options.offload.optimizer == memory::Tier::kNvme) continue;
    (optimizer_leaves ? need.host : need.persistent)[Kind::kMasterWeights] += owned_numel * master;
  }
  // On one rank a page is its shard.
  if (world_size > 1 || (page_offload != nullptr && page_offload->offloads_parameters())) {
    need.transient_bytes = options.parameter_budget_bytes > 0 ? options.parameter_budget_bytes
                                                              : 2 * largest_page_bytes;
  }
  need.transient_bytes += largest_bucket_bytes;
  return need;
}

namespace {

// own: of this rank; "" for none.
void throw_alike(const comm::World& world, const char* about, const std::string& own) {
  const std::vector<std::string> of_ranks = world.gather_text(about, own);
  ZP_CHECK(own.empty(), own);
  for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
    ZP_CHECK(of_ranks[rank].empty(), "rank ", rank, ": ", of_ranks[rank]);
  }
}

}  // namespace

void check_device_holds(const comm::World& world, const std::string& what, const MemoryNeed& need,
                        int64_t held_bytes) {
  if (!memory::has_streams(world.device().type())) return;
  throw_alike(world, "the memory of devices", shortage(world, what, need, held_bytes));
}

void check_host_holds(const comm::World& world, const std::string& what, int64_t bytes,
                      const memory::HostMemory& host) {
  const int64_t of_all = bytes * world.local_size();
  std::string own;
  if (of_all > host.usable_bytes()) {
    own =
        c10::str(what, " of ", world.local_size(), world.local_size() == 1 ? " rank " : " ranks ",
                 memory::describe_need(of_all, host),
                 "; offload less (options.offload.optimizer_bytes), offload to kNvme, keep states "
                 "smaller (options.optimizer_state), or use more hosts");
  }
  throw_alike(world, "the memory of hosts", own);
}

}  // namespace zeropage
