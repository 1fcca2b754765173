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

void PageWorlds::cut_experts(const comm::World& those, const comm::World& same) {
  ZP_CHECK(!replicas && !secondary,
           "options.shard_within and options.secondary_shard_within: experts are cut over ranks "
           "(expert_parallel()), whose pages other ranks share than those of the rest; leave both "
           "options out");
  experts = those;
  same_experts = same;
}

PlacesOfRank places_of(const PageWorlds& worlds) {
  const auto place = [](const comm::World& ranks) {
    return PlaceOfRank{.rank = ranks.rank(), .ranks = ranks.size()};
  };
  return {place(worlds.shards), place(worlds.same_experts ? *worlds.same_experts : worlds.shards)};
}

}  // namespace zeropage::zero
