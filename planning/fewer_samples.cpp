#include "planning/fewer_samples.h"

namespace zeropage::planning {
namespace {

thread_local FewerSamples* current = nullptr;

}  // namespace

FewerSamples::FewerSamples(int64_t pieces) : pieces_(pieces), before_(current) {
  current = this;
}

FewerSamples::~FewerSamples() {
  current = before_;
}

std::vector<int64_t> FewerSamples::sizes_of(const at::Tensor& tensor) {
  std::vector<int64_t> sizes = tensor.sizes().vec();
  if (current == nullptr || sizes.empty() || sizes.front() == 0) return sizes;
  if (current->samples_ == 0) current->samples_ = sizes.front();
  const int64_t samples = current->samples_;
  if (current->pieces_ > 1 && sizes.front() % samples == 0) {
    sizes.front() = sizes.front() / samples * current->planned_samples();
  }
  return sizes;
}

}  // namespace zeropage::planning
