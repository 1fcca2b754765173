#include "zero/pages/page_worlds.h"

#include "zeropage/check.h"
#include "zeropage/mesh.h"
#include "zeropage/options.h"

namespace zeropage::zero {

namespace {

void check_divides(const comm::World& world, int ranks, const char* option) {
  ZP_CHECK(ranks <= world.size() && world.size() % ranks == 0, option, ": ", world.size(),
           " ranks do not divide into groups of ", ranks,
           "; expected a divisor of the number of ranks");
}

}  // namespace

PageWorlds::PageWorlds(const comm::World& world, int shard_within, int secondary_shard_within)
    : PageWorlds(world) {
  if (secondary_shard_within != Options::kNoSecondaryShards) {
    check_divides(world, secondary_shard_within, "options.secondary_shard_within");
    if (secondary_shard_within == world.size()) return;
    const int groups = world.size() / secondary_shard_within;
    const comm::Mesh mesh(world, {{"group", groups}, {"secondary", secondary_shard_within}});
    secondary = mesh["secondary"];
    return;
  }
  if (shard_within == Options::kAllRanks) return;
  check_divides(world, shard_within, "options.shard_within");
  if (shard_within == world.size()) return;
  const comm::Mesh mesh(world, {{"replica", world.size() / shard_within}, {"shard", shard_within}});
  shards = mesh["shard"];
  replicas = mesh["replica"];
}

}  // namespace zeropage::zero
