// A few elements of each parameter's place in its page's bucket, as bits: enough to notice that
// p.grad() was changed between two moments, whoever changed it.
//
// Version counters would not do: clip_grad_norm_ changes gradients behind .data().
// Costs 16 to 31 elements of a parameter, and 8 bytes for each as the places to look at. On an
// accelerator nothing but differing() waits for the device, and that for a yes or no.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "zero/pages/parameter_pages.h"

namespace zeropage {

class BucketSamples {
 public:
  // The parameters are those of the page that train. The bucket always has the same memory, which is
  // not the meta device's.
  void add(const at::Tensor& bucket, const ParameterPages& pages,
           const std::vector<size_t>& parameters);

  bool empty() const { return buckets_.empty(); }
  // The bits now. REQUIRES: not empty. [bytes], on the buckets' device
  at::Tensor take() const;
  // The parameters whose bits differ in the two, ascending.
  std::vector<size_t> differing(const at::Tensor& left, const at::Tensor& right) const;

 private:
  struct OfBucket {
    at::Tensor bucket;
    at::Tensor places;  // [elements], int64, in the bucket
    int64_t begin = 0;  // in the sample, bytes
  };
  struct OfParameter {
    size_t parameter;
    Range bytes;  // in the sample
  };

  std::vector<OfBucket> buckets_;
  std::vector<OfParameter> parameters_;
  int64_t bytes_ = 0;
};

}  // namespace zeropage
