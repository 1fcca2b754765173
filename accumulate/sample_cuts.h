// How many samples a batch has, and where it is cut.
#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

namespace zeropage::accumulate {

// The size of dimension 0 on which all tensors of a batch agree. Throws c10::Error, by name, on one
// that does not.
class SampleCount {
 public:
  // Undefined tensors have no say.
  void see(const at::Tensor& tensor, const std::string& name);
  // Throws where no tensor was seen.
  int64_t count() const;

 private:
  int64_t count_ = -1;
  std::string counted_in_;
};

// `samples` samples in `count` stretches whose lengths differ by at most one, the longer ones
// first. Throws c10::Error unless 1 <= count <= samples, and on an index that is none.
class SampleCuts {
 public:
  SampleCuts(int64_t samples, int64_t count);

  int64_t samples() const { return samples_; }
  int64_t count() const { return count_; }
  int64_t start(int64_t index) const;
  int64_t length(int64_t index) const;

 private:
  void check_index(int64_t index) const;

  int64_t samples_;
  int64_t count_;
};

}  // namespace zeropage::accumulate
