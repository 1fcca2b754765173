#include "zero/setup/choose_gradients.h"

#include <utility>

#include "zero/gradients/owned_gradients.h"
#include "zero/gradients/sharded_gradients.h"
#include "zero/gradients/whole_gradients.h"

namespace zeropage {

Ownership ownership_of(const Stage& stage) {
  return stage.optimizer_state ? Ownership::kShard : Ownership::kWholePage;
}

std::unique_ptr<GradientBuckets> make_gradient_buckets(const Options& options,
                                                       std::shared_ptr<ParameterPages> pages) {
  // On one rank the shard is the page, and whole gradients cost no more, unless shards leave.
  const bool shards_are_pages =
      pages->world().size() == 1 &&
      (!options.stage.gradients || options.offload.optimizer == memory::Tier::kDevice);
  if (!options.stage.optimizer_state || shards_are_pages) {
    return std::make_unique<ReplicatedGradients>(std::move(pages), options);
  }
  if (!options.stage.gradients) {
    return std::make_unique<OwnedGradients>(std::move(pages), options);
  }
  return std::make_unique<ShardedGradients>(std::move(pages), options);
}

}  // namespace zeropage
