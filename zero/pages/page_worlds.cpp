#include "zero/pages/page_worlds.h"

#include "comm/mesh.h"
#include "memory/check.h"
#include "zero/options.h"

namespace zeropage {

PageWorlds::PageWorlds(const comm::World& world, int shard_within) : PageWorlds(world) {
  if (shard_within == Options::kAllRanks) return;
  ZP_CHECK(shard_within <= world.size() && world.size() % shard_within == 0,
           "options.shard_within: ", world.size(), " ranks do not divide into groups of ",
           shard_within, "; expected a divisor of the number of ranks");
  if (shard_within == world.size()) return;
  const comm::Mesh mesh(world, {{"replica", world.size() / shard_within}, {"shard", shard_within}});
  shards = mesh["shard"];
  replicas = mesh["replica"];
}

}  // namespace zeropage
