#include "examples/train_imagenet/validation.h"

#include "data/distributed_sampler.h"

namespace train_imagenet {

namespace data = zeropage::data;

Score validate(TrainedModel& trained, const ImageData& images, int64_t batch,
               const zeropage::World& world) {
  data::DistributedSampler sampler(images.validation().size(), {.rank = world.rank(),
                                                                .ranks = world.size(),
                                                                .batch = batch,
                                                                .order = data::Order::kAsTheyAre});
  data::PrefetchingLoader loader(
      sampler,
      [&](const std::vector<int64_t>& samples, int64_t) {
        std::vector<int64_t> filled = samples;
        filled.resize(static_cast<size_t>(batch), 0);
        ImageData::Batch made = images.validation_batch(filled);
        // Fewer labels than images: those that count.
        return ImageData::Batch(made.data,
                                made.target.narrow(0, 0, static_cast<int64_t>(samples.size())));
      },
      {.threads = 1});
  trained.model().eval();
  Score score;
  while (const auto next = loader.next()) {
    const torch::Tensor outputs = trained.outputs(next->data);
    const torch::Tensor labels = next->target.to(outputs.device());
    if (labels.size(0) > 0) score.add(outputs.narrow(0, 0, labels.size(0)), labels);
  }
  trained.model().train();
  return score.over_ranks(world);
}

}  // namespace train_imagenet
