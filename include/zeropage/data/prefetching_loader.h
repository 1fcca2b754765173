// Makes batches ahead of their use, with threads, in the sampler's order.
//
//   PrefetchingLoader loader(sampler, [&](const std::vector<int64_t>& samples, int64_t epoch) {
//     return augmented(images, samples, epoch);  // {data, target}
//   }, {.threads = 2});
//   for (int64_t epoch = loader.epoch(); epoch < epochs; ++epoch) {
//     loader.set_epoch(epoch);
//     while (auto batch = loader.next()) train_on(batch->data, batch->target);
//   }
//
// The order is that of the sampler, however many threads there are and whichever is done first. What `load` makes
// must depend on its arguments alone (zeropage/data/random.h); then the result does not depend on threads.
//
// A saved loader is the sampler after the last batch that next() has returned: batches that are ready or under way are made again.
//
// Lifetime: what `load` refers to outlives the loader. Threads: one calls; load() runs on the loader's threads, several at once, and
// charges the ledger of the thread that made the loader. What load() throws, next() throws in that batch's place, and again whenever it
// is called until set_epoch() or load() begins anew. The destructor waits for batches that are under way.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <torch/data/example.h>
#include <torch/serialize/archive.h>

#include "zeropage/data/distributed_sampler.h"

namespace zeropage::data {

struct LoaderOptions {
  int threads = 2;  // 0: next() makes the batch itself
  int64_t ahead =
      4;  // the most batches that are ready or under way; at least as many as threads are busy
};

class PrefetchingLoader {
 public:
  using Batch = torch::data::Example<>;
  // samples: this rank's; may be empty in the last batch of an epoch. Called without gradients.
  using Load = std::function<Batch(const std::vector<int64_t>& samples, int64_t epoch)>;

  // Begins where the sampler is. Throws c10::Error for less than 0 threads or 1 batch ahead.
  PrefetchingLoader(DistributedSampler sampler, Load load, const LoaderOptions& options = {});
  ~PrefetchingLoader();
  PrefetchingLoader(const PrefetchingLoader&) = delete;
  PrefetchingLoader& operator=(const PrefetchingLoader&) = delete;

  // Like DistributedSampler's, about what next() has returned.
  void set_epoch(int64_t epoch);
  void restart();
  std::optional<Batch> next();
  int64_t epoch() const;
  int64_t position() const;
  int64_t batches() const;
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  class Queue;

  const std::unique_ptr<Queue> queue_;
};

}  // namespace zeropage::data
