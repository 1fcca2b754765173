#include "zero/gradients/bucket_samples.h"

#include <algorithm>

#include <ATen/ops/equal.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include "memory/exact.h"

namespace zeropage {
namespace {

// Of a parameter: enough that a change of all elements does not hide behind a few zeros.
constexpr int64_t kSampledElements = 16;
// Of no dtype more bytes an element, so each bucket's bits are aligned.
constexpr int64_t kAlignmentBytes = 8;

}  // namespace

void BucketSamples::add(const at::Tensor& bucket, const ParameterPages& pages,
                        const std::vector<size_t>& parameters) {
  const auto itemsize = static_cast<int64_t>(bucket.element_size());
  const int64_t begin = memory::round_up(bytes_, kAlignmentBytes);
  std::vector<int64_t> places;
  const auto end = [&] { return begin + static_cast<int64_t>(places.size()) * itemsize; };
  for (const size_t index : parameters) {
    const Range& range = pages.parameters()[index].range;
    const int64_t stride = std::max<int64_t>(1, range.numel() / kSampledElements);
    const int64_t first = end();
    for (int64_t at = range.begin; at < range.end; at += stride) places.push_back(at);
    parameters_.push_back({index, {first, end()}});
  }
  bytes_ = end();
  buckets_.push_back({bucket, at::tensor(places, at::kLong).to(bucket.device()), begin});
  std::sort(parameters_.begin(), parameters_.end(),
            [](const auto& left, const auto& right) { return left.parameter < right.parameter; });
}

at::Tensor BucketSamples::take() const {
  // Zeros: what lies between the buckets' bits is compared too.
  const at::Tensor sample = at::zeros({bytes_}, buckets_.front().bucket.options().dtype(at::kByte));
  for (const OfBucket& of : buckets_) {
    const int64_t bytes = of.places.numel() * static_cast<int64_t>(of.bucket.element_size());
    at::Tensor bits = sample.narrow(0, of.begin, bytes).view(of.bucket.scalar_type());
    at::index_select_out(bits, of.bucket, 0, of.places);
  }
  return sample;
}

std::vector<size_t> BucketSamples::differing(const at::Tensor& left,
                                             const at::Tensor& right) const {
  std::vector<size_t> parameters;
  if (at::equal(left, right)) return parameters;
  const auto of = [](const at::Tensor& sample, const Range& bytes) {
    return sample.narrow(0, bytes.begin, bytes.numel());
  };
  const at::Tensor left_bytes = left.cpu(), right_bytes = right.cpu();
  for (const OfParameter& one : parameters_) {
    if (!at::equal(of(left_bytes, one.bytes), of(right_bytes, one.bytes))) {
      parameters.push_back(one.parameter);
    }
  }
  return parameters;
}

}  // namespace zeropage
