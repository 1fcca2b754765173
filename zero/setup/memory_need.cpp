#include "zero/setup/memory_need.h"

#include <algorithm>

#include "device/stream.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"
#include "zeropage/device.h"
#include "zeropage/ledger.h"

namespace zeropage::zero {
namespace {

using memory::format_bytes;
using memory::Kind;

// "" if it fits.
std::string shortage(const comm::World& world, const std::string& what, const MemoryNeed& need) {
  const memory::DeviceMemory device = memory::device_memory(world.device());
  const int64_t needed = need.persistent.total() + need.transient_bytes;
  // What ranks hold already is not free, and what they are about to take is alike.
  const int sharing = world.ranks_on_device();
  const int64_t available = device.free_bytes / sharing + device.cached_bytes;
  if (needed - need.held_bytes <= available) return "";
  memory::Breakdown shown = need.persistent;
  shown[Kind::kStaging] += need.transient_bytes;
  return c10::str(
      what, " needs ", format_bytes(needed), " on ", world.device(),
      " before any activation, but of its ", format_bytes(device.total_bytes), " only ",
      format_bytes(available + need.held_bytes), " are for this process",
      sharing == 1 ? std::string() : c10::str(", as ", sharing, " ranks share what is free on it"),
      "; use more ", sharing == 1 ? "ranks" : "devices",
      ", a higher stage, smaller pages or a lower precision\n",
      memory::memory_table(
          std::vector<memory::MemoryColumn>{{"needed", shown, need.persistent.total()}}));
}

}  // namespace

void throw_alike(const comm::World& world, const char* about, const std::string& own) {
  const std::vector<std::string> of_ranks = world.gather_text(about, own);
  ZP_CHECK(own.empty(), own);
  for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
    ZP_CHECK(of_ranks[rank].empty(), "rank ", rank, ": ", of_ranks[rank]);
  }
}

void check_device_holds(const comm::World& world, const std::string& what, const MemoryNeed& need) {
  if (!device::has_streams(world.device().type())) return;
  throw_alike(world, "the memory of devices", shortage(world, what, need));
}

void check_host_holds(const comm::World& world, const std::string& what, int64_t bytes,
                      const device::HostMemory& host) {
  // A simulated world's hosts are other machines.
  if (world.device().is_meta()) return;
  const int64_t of_all = bytes * world.local_size();
  std::string own;
  if (of_all > host.usable_bytes()) {
    own = c10::str(what, " of ", world.local_size(), world.local_size() == 1 ? " rank " : " ranks ",
                   device::describe_need(of_all, host),
                   "; offload less (options.offload.optimizer_bytes), offload to nvme "
                   "(options.offload.optimizer), keep states smaller (options.optimizer_state), or "
                   "use more hosts");
  }
  throw_alike(world, "the memory of hosts", own);
}

}  // namespace zeropage::zero
