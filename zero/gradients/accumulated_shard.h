// The reduced gradient of what this rank owns of a page, for strategies that keep only that: it adds up the
// reductions of one or several backwards until the step.
#pragma once

#include <functional>
#include <memory>

#include <ATen/core/TensorBody.h>

#include "offload/copy_engine.h"
#include "zero/gradients/backward_plan.h"
#include "zero/gradients/gradient_memory.h"
#include "zero/gradients/micro_step_sums.h"
#include "zero/layout/shard_layout.h"
#include "zero/tiers/tier_storage.h"
#include "zeropage/detail/pending.h"

namespace zeropage::zero {

class AccumulatedShard {
 public:
  virtual ~AccumulatedShard() = default;
  AccumulatedShard(const AccumulatedShard&) = delete;
  AccumulatedShard& operator=(const AccumulatedShard&) = delete;

  // [owned numel]; has what was taken once arrival() has ended. Undefined if it is not kept.
  virtual at::Tensor values() const = 0;
  // Where values() is memory that p.grad() keeps between backwards; null where it is always there.
  virtual GradientMemory* memory() { return nullptr; }
  // p.grad() alone keeps values() from here on, unless they are kept to be added to.
  virtual void let_go() {}
  // New memory for values(), if it may go.
  virtual at::Tensor renew() { return values(); }
  virtual memory::Pending arrival() const { return {}; }
  // Whether values() have the sum so far.
  virtual bool has_sum() const { return true; }
  // Waits until values() are there and nothing else of what was taken is held.
  virtual void wait() {}

  // Whether take() adds to what is kept in values().
  virtual bool adds_up() const { return false; }
  // The mean or sum of a backward, added to what is kept, unless that waits for complete().
  virtual void take(const at::Tensor& mean, Backwards backwards) = 0;
  // What was taken so far is added to the next. REQUIRES: values() are there.
  virtual void keep() = 0;
  // What was taken so far is not added to the next.
  virtual void forget() = 0;
  virtual void skip() = 0;
  virtual void zero(const Range& range) = 0;
  // Makes values() the sum of all; whether that changed them.
  virtual bool complete() = 0;

 protected:
  AccumulatedShard() = default;
};

// In one place, which reductions add to, from the first of them until p.grad() lets it go.
class ResidentGradient final : public AccumulatedShard {
 public:
  // make: new memory, [owned numel].
  ResidentGradient(std::function<at::Tensor()> make, SumOrder order)
      : make_(std::move(make)), sums_(order) {}

  at::Tensor values() const override { return values_.get(); }
  GradientMemory* memory() override { return &values_; }
  void let_go() override {
    if (!kept_) values_.let_go();
  }
  at::Tensor renew() override;
  bool adds_up() const override { return kept_; }
  void take(const at::Tensor& mean, Backwards backwards) override;
  void keep() override;
  void forget() override;
  void skip() override;
  void zero(const Range& range) override;
  bool complete() override;

 private:
  const std::function<at::Tensor()> make_;
  GradientMemory values_;
  bool kept_ = false;   // values_ is added to the next, in running order
  MicroStepSums sums_;  // of earlier backwards, in tree order
};

// On the host. A backward's gradient goes down as soon as it is reduced; those of several backwards
// of a step are added up on the device first, so each element goes down once a step: that costs the
// owned part on the device from the first to the last of them.
class OffloadedGradient final : public AccumulatedShard {
 public:
  // host: [owned numel], the page's tensor of that storage. storage and copies outlive it.
  OffloadedGradient(at::Tensor host, TierStorage& storage, size_t page, c10::Device device,
                    SumOrder order, offload::CopyEngine& copies);
  ~OffloadedGradient() override;

  at::Tensor values() const override { return host_; }
  memory::Pending arrival() const override { return down_; }
  bool has_sum() const override { return !on_device_; }
  void wait() override;
  void take(const at::Tensor& mean, Backwards backwards) override;
  void keep() override;
  void forget() override;
  void skip() override;
  void zero(const Range& range) override;
  bool complete() override;

 private:
  ResidentGradient& on_device();
  void start_down(const at::Tensor& from);

  const at::Tensor host_;
  TierStorage& storage_;
  const size_t page_;
  const c10::Device device_;
  const SumOrder order_;
  offload::CopyEngine& copies_;
  // While several backwards add up.
  std::unique_ptr<ResidentGradient> on_device_;
  memory::Pending down_;
};

}  // namespace zeropage::zero
