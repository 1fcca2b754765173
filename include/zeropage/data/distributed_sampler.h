// Which samples this rank takes, batch by batch, of a data set that the ranks share.
//
//   DistributedSampler sampler(images.size(), {.rank = world.rank(), .ranks = world.size(), .batch = 64, .seed = 1});
//   for (int64_t epoch = sampler.epoch(); epoch < epochs; ++epoch) {
//     sampler.set_epoch(epoch);
//     while (auto samples = sampler.next()) train_on(*samples);
//   }
//
// An epoch is one order of all samples. The ranks' next batches together are the next batch * ranks samples of that order, of which
// rank r takes the r-th part. So all ranks have as many batches, and no sample comes twice. Of the last samples, where they are fewer,
// each rank takes an equal share to within one; it may be none, and the batch is then empty.
//
// The order belongs to the seed and the epoch alone. What is saved is how many samples of the epoch all ranks together have had, which
// is alike on all ranks, so a run goes on in mid-epoch at another number of ranks and with another batch, and every
// sample of the epoch comes once (RunState::extras takes RunExtra::of(sampler)).
//
// Memory: 8 bytes a sample, which copies share. Costs no message. Threads: one at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <torch/serialize/archive.h>

namespace zeropage::data {

enum class Order : uint8_t { kShuffled, kAsTheyAre };

// The samples at the end of an epoch that do not fill a batch on all ranks.
enum class LastBatch : uint8_t { kShared, kDropped };

struct SamplerOptions {
  int rank = 0;
  int ranks = 1;
  int64_t batch = 1;               // samples of one rank's batch
  Order order = Order::kShuffled;  // kAsTheyAre: for an evaluation
  LastBatch last = LastBatch::kShared;
  uint64_t seed = 0;  // alike on all ranks
};

class DistributedSampler {
 public:
  // Begins epoch 0. Throws c10::Error for sizes below 1, a rank that there is not, and an epoch that would
  // have no batch.
  DistributedSampler(int64_t samples, const SamplerOptions& options);

  // Begins an epoch. The present one goes on where it is, so that the loop above serves a resumed run too.
  void set_epoch(int64_t epoch);
  // Begins the present epoch again.
  void restart();
  // This rank's next samples; nothing, once, when the epoch has ended on all ranks. Throws after that, because a
  // loop without set_epoch() would train on nothing.
  std::optional<std::vector<int64_t>> next();

  int64_t samples() const { return samples_; }
  int64_t epoch() const { return epoch_; }
  // Samples of the epoch that all ranks together have had.
  int64_t position() const { return position_; }
  // Batches of the whole epoch, the same on all ranks.
  int64_t batches() const;
  const SamplerOptions& options() const { return options_; }

  // load() throws if the state has another number of samples, seed or order.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  int64_t global_batch() const { return options_.batch * options_.ranks; }
  std::vector<int64_t> order_of(int64_t epoch) const;
  void begin(int64_t epoch, int64_t position);

  int64_t samples_;
  SamplerOptions options_;
  std::shared_ptr<const std::vector<int64_t>> order_;  // of the epoch
  int64_t epoch_ = 0;
  int64_t position_ = 0;
  bool has_ended_ = false;  // and the caller was told
};

}  // namespace zeropage::data
