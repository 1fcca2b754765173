#include "zero/pages/first_values.h"

#include <bit>
#include <optional>
#include <string>

#include "zeropage/communicator.h"

namespace zeropage::zero {
namespace {

// A storage's values, by the ranks that keep them.
class ValuesByRank {
 public:
  ValuesByRank(const ParameterPages& pages, size_t storage, const at::Tensor& values)
      : range_(pages.storages()[storage].range),
        shard_numel_(pages.layouts()[pages.storages()[storage].page].shard_numel),
        values_(values) {}

  // What ranks [first, end) keep, which lies in one piece. May be empty.
  at::Tensor of(int first, int end) const {
    const Range kept = intersection(range_, {first * shard_numel_, end * shard_numel_});
    if (kept.empty()) return values_.narrow(0, 0, 0);
    return values_.narrow(0, kept.begin - range_.begin, kept.numel());
  }

 private:
  const Range range_;  // in the page
  const int64_t shard_numel_;
  const at::Tensor values_;
};

// The first of ranks [first, end) has what all of them keep. It hands the part of the upper half to that half's first, and so on
// in each half. The lower half is a power of two, so that ranks of a host stay together.
void pass_down(comm::Communicator& ranks, const ValuesByRank& values, const std::string& what) {
  int first = 0;
  int end = ranks.size();
  while (end - first > 1) {
    const int upper =
        first + static_cast<int>(std::bit_floor(static_cast<unsigned>(end - first - 1)));
    const at::Tensor theirs = values.of(upper, end);
    const bool is_sent = theirs.numel() > 0;
    if (is_sent && ranks.rank() == first) ranks.send(theirs, upper, what).wait();
    if (is_sent && ranks.rank() == upper) ranks.recv(theirs, first, what).wait();
    (ranks.rank() < upper ? end : first) = upper;
  }
}

// The groups of hybrid sharding have the same shards: the first one's ranks get them from rank 0, and send them to their like.
void take_shard(const ParameterPages& pages, size_t storage, const at::Tensor& values,
                const std::string& what) {
  const size_t page = pages.storages()[storage].page;
  const PageWorlds& worlds = pages.worlds();
  const comm::World& shards = pages.shards(page);
  const ValuesByRank by_rank(pages, storage, values);
  if (pages.is_of_experts(page) || worlds.group() == 0) {
    pass_down(shards.communicator(), by_rank, what);
  }
  if (pages.is_of_experts(page) || !worlds.replicas) return;
  const at::Tensor own = by_rank.of(shards.rank(), shards.rank() + 1);
  if (own.numel() == 0) return;
  worlds.replicas->communicator().broadcast(own, /*root=*/0, what).wait();
}

}  // namespace

void bring_first_values(const ParameterPages& pages, size_t storage, const at::Tensor& values) {
  if (values.numel() == 0) return;
  const PlacedStorage& placed = pages.storages()[storage];
  const NamedParameter& first = pages.parameters()[placed.parameters.front()].parameter;
  const std::string what = "parameter \"" + first.name() + "\"";
  // What no rank of a tensor-parallel group has a slice of, all have alike. Before shards are cut, which lie elsewhere in the pages
  // of ranks whose slices have other sizes.
  const comm::World* const slices = pages.tensor_world();
  if (slices != nullptr && !first.slice) {
    slices->communicator().broadcast(values, /*root=*/0, what).wait();
  }
  if (pages.is_sharded(placed.page)) {
    take_shard(pages, storage, values, what);
  } else {
    pages.world(placed.page).communicator().broadcast(values, /*root=*/0, what).wait();
  }
}

}  // namespace zeropage::zero
