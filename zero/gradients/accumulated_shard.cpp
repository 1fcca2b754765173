#include "zero/gradients/accumulated_shard.h"

#include <utility>

#include <ATen/ops/empty.h>

#include "zeropage/ledger.h"

namespace zeropage::zero {

at::Tensor ResidentGradient::renew() {
  values_.set(make_());
  return values_.get();
}

void ResidentGradient::take(const at::Tensor& mean, Backwards /*backwards*/) {
  if (std::exchange(kept_, false)) {
    // Rounded as whole gradients are before they are added.
    values().add_(mean.to(values().scalar_type()));
  } else {
    renew().copy_(mean);
  }
}

void ResidentGradient::keep() {
  kept_ = sums_.order() == SumOrder::kRunning;
  if (kept_) {
    values_.hold();
    return;
  }
  const memory::KindScope kind(memory::Kind::kGradient);
  sums_.push(values());
}

void ResidentGradient::forget() {
  kept_ = false;
  values_.reset();
  sums_.clear();
}

void ResidentGradient::skip() {
  kept_ = false;
  values_.reset();
  sums_.skip();
}

void ResidentGradient::zero(const Range& range) {
  if (const at::Tensor there = values(); there.defined()) {
    there.narrow(0, range.begin, range.numel()).zero_();
  }
  sums_.zero(range.begin, range.numel());
}

bool ResidentGradient::complete() {
  if (sums_.empty()) return false;
  const at::Tensor sum = values();
  if (sum.defined()) {
    sums_.add_to(sum);
  } else {
    // It was zeroed.
    sums_.clear();
  }
  return sum.defined();
}

OffloadedGradient::OffloadedGradient(at::Tensor host, TierStorage& storage, size_t page,
                                     c10::Device device, SumOrder order,
                                     offload::CopyEngine& copies)
    : host_(std::move(host)),
      storage_(storage),
      page_(page),
      device_(device),
      order_(order),
      copies_(copies) {}

// What the copy reads must not go before it has ended.
OffloadedGradient::~OffloadedGradient() {
  try {
    down_.synchronize();
  } catch (const std::exception&) {
    // Whoever waited for the gradient was told.
  }
}

ResidentGradient& OffloadedGradient::on_device() {
  if (!on_device_) {
    on_device_ = std::make_unique<ResidentGradient>(
        [options = host_.options().device(device_), numel = host_.numel()] {
          const memory::KindScope kind(memory::Kind::kGradient);
          return at::empty({numel}, options);
        },
        order_);
  }
  return *on_device_;
}

void OffloadedGradient::wait() {
  down_.synchronize();
  down_ = {};
}

void OffloadedGradient::start_down(const at::Tensor& from) {
  wait();
  storage_.before_write(page_);
  storage_.begin_writing(page_);
  down_ = copies_.start(offload::Direction::kToHost, host_, from);
}

void OffloadedGradient::take(const at::Tensor& mean, Backwards backwards) {
  const bool more_follow = backwards == Backwards::kMoreFollow;
  if (more_follow || on_device_) on_device().take(mean, backwards);
  if (more_follow) return;
  if (on_device_) {
    complete();
  } else {
    start_down(mean.to(host_.scalar_type()));
  }
}

void OffloadedGradient::keep() {
  // It went down as if it were all of the step's, and comes back to be added to.
  if (!on_device_) {
    wait();
    storage_.fetch(page_);
    copies_.start(offload::Direction::kToDevice, on_device().renew(), host_).synchronize();
    storage_.release(page_, TierStorage::Use::kRead);
  }
  on_device_->keep();
}

void OffloadedGradient::forget() {
  on_device_.reset();
}

void OffloadedGradient::skip() {
  on_device().skip();
}

void OffloadedGradient::zero(const Range& range) {
  wait();
  if (on_device_) {
    on_device_->zero(range);
  } else if (storage_.has_values(page_)) {
    storage_.before_write(page_);
    host_.narrow(0, range.begin, range.numel()).zero_();
  }
}

bool OffloadedGradient::complete() {
  if (!on_device_) return false;
  on_device_->complete();
  // What is on its way keeps its memory.
  start_down(on_device_->values());
  on_device_.reset();
  return true;
}

}  // namespace zeropage::zero
