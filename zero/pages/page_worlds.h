// Among whom a model's pages are sharded, and who has the same shards.
//
// With Options::shard_within the ranks of a world form groups of that many neighbours. A page is sharded
// within a group, and each group has all of it: hybrid sharding (Zhang et al. 2022, "MiCS", section 3.1;
// HYBRID_SHARD of PyTorch FSDP). What every rank needs of the others in forward and backward then stays
// within a group; gradients alone travel between groups, as shards.
//
// Experts may be cut over ranks (zeropage/expert_parallel.h). Then the ranks that have the same ones train them together, and share
// their pages.
//
// With Options::secondary_shard_within such groups keep pages a second time (zero/pages/shard_source.h).
//
// A handle, as World.
#pragma once

#include <optional>

#include "zero/layout/shard_layout.h"
#include "zeropage/world.h"

namespace zeropage::zero {

struct PageWorlds {
  // One group. Implicit, as it is a world then.
  PageWorlds(comm::World world) : all(world), shards(std::move(world)) {}
  // shard_within: ranks a group, at least 2, of which the world has a whole number; or
  // Options::kAllRanks. Collective over the world where there are several groups.
  // secondary_shard_within: ranks that share a page's second copy; or Options::kNoSecondaryShards.
  PageWorlds(const comm::World& world, int shard_within, int secondary_shard_within);

  // those: this rank's group along the axis "expert". same: the ranks that have the same experts. Throws where other groups are wanted
  // too.
  void cut_experts(const comm::World& those, const comm::World& same);

  int groups() const { return all.size() / shards.size(); }
  // The group of this rank.
  int group() const { return all.rank() / shards.size(); }
  // The first rank of this rank's group.
  int first_rank() const { return group() * shards.size(); }

  comm::World all;     // that train the model together
  comm::World shards;  // this rank's group
  std::optional<comm::World>
      replicas;  // those that have this rank's shards, by group; if there are others
  std::optional<comm::World> secondary;  // those that share a second copy of pages, if any do
  // Where experts are cut over ranks: those that have all of them, and those that have the same ones.
  std::optional<comm::World> experts;
  std::optional<comm::World> same_experts;
};

PlacesOfRank places_of(const PageWorlds& worlds);

}  // namespace zeropage::zero
