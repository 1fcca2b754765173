#include "language_model/generate/sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace language_model {

int32_t Sampler::choose(const torch::Tensor& logits) {
  const torch::Tensor host = logits.to(torch::kCPU).contiguous();
  const float* const values = host.const_data_ptr<float>();
  const int64_t count = host.numel();
  // Equal logits: the lower number, as everywhere below.
  if (options_.temperature == 0) {
    return static_cast<int32_t>(std::max_element(values, values + count) - values);
  }
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), 0);
  const auto is_before = [&](int32_t left, int32_t right) {
    return values[left] != values[right] ? values[left] > values[right] : left < right;
  };
  if (options_.top_k > 0 && options_.top_k < count) {
    std::partial_sort(tokens.begin(), tokens.begin() + options_.top_k, tokens.end(), is_before);
    tokens.resize(static_cast<size_t>(options_.top_k));
  } else {
    std::sort(tokens.begin(), tokens.end(), is_before);
  }
  std::vector<double> until(tokens.size());  // sums of probabilities, not normalised
  double sum = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    sum += std::exp((values[tokens[i]] - values[tokens[0]]) / options_.temperature);
    until[i] = sum;
  }
  const auto least = std::lower_bound(until.begin(), until.end(), options_.top_p * sum);
  const size_t kept = std::min(tokens.size(), static_cast<size_t>(least - until.begin()) + 1);
  // 53 bits, on all machines alike.
  const double drawn = static_cast<double>(random_() >> 11) * 0x1.0p-53 * until[kept - 1];
  const auto chosen =
      std::upper_bound(until.begin(), until.begin() + static_cast<int64_t>(kept) - 1, drawn);
  return tokens[static_cast<size_t>(chosen - until.begin())];
}

}  // namespace language_model
