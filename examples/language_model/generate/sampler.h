// Chooses the next token.
#pragma once

#include <cstdint>
#include <random>

#include <torch/torch.h>

namespace language_model {

struct SamplingOptions {
  // 0: always the most probable token. Below 1 sharpens, above 1 flattens.
  double temperature = 0;
  // Only from the most probable ones: as many, or 0 for all.
  int64_t top_k = 0;
  // Only from the fewest most probable ones whose probabilities, after temperature and top_k, are together at least this: above 0,
  // up to 1.
  double top_p = 1;
};

// The same tokens for the same logits and seed. Threads: one.
class Sampler {
 public:
  Sampler(const SamplingOptions& options, uint64_t seed) : options_(options), random_(seed) {}

  // logits: [vocabulary], fp32, any device.
  int32_t choose(const torch::Tensor& logits);

 private:
  const SamplingOptions options_;
  std::mt19937_64 random_;
};

}  // namespace language_model
