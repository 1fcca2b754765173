#include "train_imagenet/validation.h"

#include <algorithm>
#include <numeric>

#include <zeropage/data/distributed_sampler.h>

namespace train_imagenet {

namespace data = zeropage::data;

Score validate(TrainedModel& trained, const ImageData& images, int64_t batch,
               const zeropage::World& world) {
  // Ranks take whole batches, not samples: which images a kernel sees together, and in which place, can change an image's last digits.
  const int64_t count = images.validation().size();
  data::DistributedSampler batches(
      (count + batch - 1) / batch,
      {.rank = world.rank(), .ranks = world.size(), .batch = 1, .order = data::Order::kAsTheyAre});
  const auto load = [&](const std::vector<int64_t>& turn, int64_t /*epoch*/) {
    // The first image, which does not count, fills the last batch, and that of a rank for which none is left.
    std::vector<int64_t> samples(static_cast<size_t>(batch), 0);
    int64_t counting = 0;
    if (!turn.empty()) {
      const int64_t first = turn.front() * batch;
      counting = std::min(batch, count - first);
      std::iota(samples.begin(), samples.begin() + counting, first);
    }
    ImageData::Batch made = images.validation_batch(samples);
    // Fewer labels than images: those that count.
    return ImageData::Batch(made.data, made.target.narrow(0, 0, counting));
  };
  data::PrefetchingLoader loader(batches, load, {.threads = 1});
  trained.model().eval();
  Score score;
  while (const auto next = loader.next()) {
    const torch::Tensor outputs = trained.outputs(next->data);
    const torch::Tensor labels = next->target.to(outputs.device());
    // Those of files that cannot be read have no label.
    const torch::Tensor can_count = labels.ge(0).nonzero().squeeze(1);
    if (can_count.size(0) > 0) {
      score.add(outputs.index_select(0, can_count), labels.index_select(0, can_count));
    }
  }
  trained.model().train();
  return score.over_ranks(world);
}

}  // namespace train_imagenet
