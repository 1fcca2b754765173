// A network with all that its training needs: the wrapper, the optimizer, micro-batches, recompute and offload, the average of its weights.
#pragma once

#include <memory>
#include <optional>

#include <zeropage/data/prefetching_loader.h>
#include <zeropage/zeropage.h>

#include "train_imagenet/criterion.h"
#include "train_imagenet/network.h"
#include "train_imagenet/score.h"

namespace train_imagenet {

// What one step is made of.
struct StepInput {
  const zeropage::data::PrefetchingLoader::Batch& batch;  // this rank's samples
  double learning_rate;
  zeropage::data::SampleRandom random;  // alike on all ranks; of mixup
};

class TrainedModel {
 public:
  using Model = zeropage::DistributedDataParallel<std::shared_ptr<image_models::ImageModel>>;

  // Collective.
  TrainedModel(const Config& config, const Network& network, const zeropage::World& world);

  // Collective. Adds the batch to the score; labels are those before mixing.
  zeropage::StepReport step(const StepInput& input, Score& score);
  // Whether all parameters and buffers of all ranks are finite. Collective.
  bool is_finite(const zeropage::World& world) const;
  // Without gradients: [batch, classes] fp32.
  torch::Tensor outputs(const torch::Tensor& images);

  // On what was loaded into the network (Network::note).
  const std::string& note() const { return note_; }
  Model& model() { return model_; }
  zeropage::ShardedOptimizer& optimizer() { return *optimizer_; }
  zeropage::Accumulator& accumulator() { return accumulator_; }
  zeropage::WeightAverage* average() { return average_.get(); }  // null: none is asked for

 private:
  void micro_step(const zeropage::data::PrefetchingLoader::Batch& batch, double share,
                  Score& score);

  const c10::Device device_;
  Model model_;
  const std::unique_ptr<zeropage::ShardedOptimizer> optimizer_;
  zeropage::Accumulator accumulator_;
  const std::unique_ptr<zeropage::WeightAverage> average_;
  std::optional<zeropage::checkpointing::Recompute> recompute_;  // nothing: none is asked for
  std::optional<zeropage::checkpointing::ActivationOffload> offload_;
  const Criterion criterion_;
  const int64_t micro_steps_;
  const std::string note_;
};

}  // namespace train_imagenet
