// Which element of which parameter lies where: the only place that computes an offset. Pure
// integers.
//
// A page is a flat run of elements; slots are the storages in it. Rank r owns elements [r *
// shard_numel, (r + 1) * shard_numel) of a page, shard_numel = round_up(numel / world_size, 256),
// and the page's buffer is padded to world_size * shard_numel, so that collectives work in place.
// Every rank owns a full shard; the last ones may be padding only.
//
// Slots begin at multiples of 64 bytes, where LibTorch's own tensors begin: matrix kernels choose
// their code by alignment, and other code could round differently.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

#include "zeropage/detail/range.h"

namespace zeropage::zero {

// Shards are whole numbers of such blocks; sums over a shard's blocks are then the same for any
// world size.
inline constexpr int64_t kShardBlockNumel = 256;
inline constexpr int64_t kSlotAlignmentBytes = 64;

// A storage to be placed: one parameter's, or one that several share.
struct StorageSpec {
  std::string name;  // of its first parameter
  int64_t numel = 0;
  c10::ScalarType dtype = c10::ScalarType::Float;
  bool requires_grad = true;
  // Which element of a ModuleList or Sequential it belongs to; pages prefer to end where this
  // changes.
  int unit = 0;
  // Whether it has a page of its own, so that its shards do not depend on what lies beside it.
  bool alone = false;
  // Whether it is of a slice of experts, which other ranks share than the rest (zero/pages/page_worlds.h).
  bool of_experts = false;
  // Where its parameters lie in it; empty: it is one parameter.
  std::vector<Range> parameters = {};
};

struct Slot {
  size_t storage = 0;                  // index into the specs
  Range range;                         // in the page
  std::vector<Range> parameters = {};  // that lie in it, in the page
};

struct PageLayout {
  // What its parameters' names have in common, "blocks.3", and unique: "blocks.3 (part 2)".
  std::string name;
  c10::ScalarType dtype = c10::ScalarType::Float;
  bool requires_grad = true;
  bool of_experts = false;
  std::vector<Slot> slots;  // one behind the other
  int64_t numel = 0;        // to the end of the last slot
  int64_t shard_numel = 0;  // a rank's share, a multiple of kShardBlockNumel

  int64_t padded_numel(int world_size) const { return shard_numel * world_size; }
  // From `end`, where a slot ends, to where the next begins or the page ends; empty within a slot.
  Range padding_after(int64_t end) const;
  Range shard(int rank) const { return {rank * shard_numel, (rank + 1) * shard_numel}; }
};

// A rank's place among those that share pages.
struct PlaceOfRank {
  int rank = 0;
  int ranks = 1;
};

// The same for each kind of page.
struct PlacesOfRank {
  // Implicit: where all pages are shared by the same ranks.
  PlacesOfRank(PlaceOfRank all) : others(all), of_experts(all) {}
  PlacesOfRank(PlaceOfRank others, PlaceOfRank of_experts)
      : others(others), of_experts(of_experts) {}

  const PlaceOfRank& of(const PageLayout& page) const {
    return page.of_experts ? of_experts : others;
  }

  PlaceOfRank others;
  PlaceOfRank of_experts;  // among the ranks that have the same experts
};

struct LayoutOptions {
  int world_size = 1;
  int64_t page_bytes = 0;
  int ranks_of_experts = 1;  // that share a page of experts
};

// Packs storages into pages in the order given. A page has one dtype and one requires_grad, and is of experts or not; it is
// closed before it would exceed page_bytes (a larger storage gets a page of its own), and at the
// end of a unit once it holds a sixteenth of page_bytes.
std::vector<PageLayout> lay_out_pages(const std::vector<StorageSpec>& storages,
                                      const LayoutOptions& options);

}  // namespace zeropage::zero
