#include <algorithm>

#include "zeropage/batches.h"
#include "zeropage/check.h"

namespace zeropage::accumulate {

void SampleCount::see(const at::Tensor& tensor, const std::string& name) {
  if (!tensor.defined()) return;
  ZP_CHECK(tensor.dim() > 0, "micro_batches: ", name,
           " has no dimensions; expected dimension 0 to count samples: stack the samples "
           "(torch::data::transforms::Stack), or unsqueeze(0) it");
  if (count_ < 0) {
    count_ = tensor.size(0);
    counted_in_ = name;
  }
  ZP_CHECK(tensor.size(0) == count_, "micro_batches: ", name, " has ", tensor.size(0),
           " samples, but ", counted_in_, " has ", count_,
           "; dimension 0 counts samples and must be the same in all tensors of a batch");
}

int64_t SampleCount::count() const {
  ZP_CHECK(count_ >= 0,
           "micro_batches: the batch holds no defined tensor, so there are no samples "
           "to cut");
  return count_;
}

SampleCuts::SampleCuts(int64_t samples, int64_t count) : samples_(samples), count_(count) {
  ZP_CHECK(count >= 1, "micro_batches: expected 1 micro-batch or more, got ", count,
           "; 1 is the whole batch");
  ZP_CHECK(count <= samples, "micro_batches: cannot cut ", samples, " samples into ", count,
           " micro-batches; ask for at most one a sample, or load larger batches");
}

int64_t SampleCuts::start(int64_t index) const {
  check_index(index);
  return index * (samples_ / count_) + std::min(index, samples_ % count_);
}

int64_t SampleCuts::length(int64_t index) const {
  check_index(index);
  return samples_ / count_ + (index < samples_ % count_ ? 1 : 0);
}

void SampleCuts::check_index(int64_t index) const {
  ZP_CHECK(index >= 0 && index < count_, "micro_batches: expected an index from 0 to ", count_ - 1,
           ", got ", index);
}

}  // namespace zeropage::accumulate
