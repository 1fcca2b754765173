#include "zero/setup/choose_gradients.h"

#include <utility>

#include "zero/gradients/owned_gradients.h"
#include "zero/gradients/sharded_gradients.h"
#include "zero/gradients/whole_gradients.h"

namespace zeropage {

std::unique_ptr<GradientBuckets> make_gradient_buckets(const Options& options,
                                                       std::shared_ptr<ParameterPages> pages) {
  Sharing sharing = pages->plan().gradients();
  // On one rank the shard is the page, and whole gradients cost no more, unless shards leave.
  const bool leave =
      sharing == Sharing::kSharded && options.offload.optimizer != memory::Tier::kDevice;
  if (pages->world().size() == 1 && !leave) sharing = Sharing::kReplicated;
  switch (sharing) {
    case Sharing::kReplicated:
      return std::make_unique<ReplicatedGradients>(std::move(pages), options);
    case Sharing::kOwned:
      return std::make_unique<OwnedGradients>(std::move(pages), options);
    case Sharing::kSharded:
      break;
  }
  return std::make_unique<ShardedGradients>(std::move(pages), options);
}

}  // namespace zeropage
