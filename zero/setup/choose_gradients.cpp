#include "zero/setup/choose_gradients.h"

#include <utility>

#include "zero/gradients/owned_buckets.h"
#include "zero/gradients/sharded_buckets.h"
#include "zero/gradients/whole_buckets.h"

namespace zeropage::zero {

std::unique_ptr<GradientBuckets> make_gradient_buckets(const Options& options,
                                                       std::shared_ptr<ParameterPages> pages) {
  Sharing sharing = pages->plan().gradients();
  // On one rank the shard is the page, and whole gradients cost no more, unless shards leave.
  const bool leave =
      sharing == Sharing::kSharded && options.offload.optimizer != memory::Tier::kDevice;
  if (pages->world().size() == 1 && !leave) sharing = Sharing::kReplicated;
  switch (sharing) {
    case Sharing::kReplicated:
      return std::make_unique<ReplicatedBuckets>(std::move(pages), options);
    case Sharing::kOwned:
      return std::make_unique<OwnedBuckets>(std::move(pages), options);
    case Sharing::kSharded:
      break;
  }
  return std::make_unique<ShardedBuckets>(std::move(pages), options);
}

}  // namespace zeropage::zero
