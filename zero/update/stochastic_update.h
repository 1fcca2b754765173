// Updates bfloat16 parameters without master weights: in fp32 by another update, then rounded up or
// down at random (optim/stochastic_rounding), so that an update far below the last place still
// counts on average.
//
// An element's random bits follow from the seed, the number of the step, the parameter's number and
// the element's place in it: neither from the split over ranks nor from threads. While a page is
// updated its owned part exists in fp32 too: 4 bytes an element.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "zero/update/page_update.h"

namespace zeropage::zero {

class StochasticUpdate final : public PageUpdate {
 public:
  // part.values: bfloat16, without copy_out. make_update: of the update in fp32.
  StochasticUpdate(const OwnedPart& part, uint64_t seed, const MakePageUpdate& make_update);

  void add_groups(std::vector<OwnedGroup> groups) override;
  void set_options(size_t group, const torch::optim::OptimizerOptions& options) override;
  void step(const at::Tensor& gradient, const HasGradient& has_gradient,
            const optim::GradientFactors& factors, const Directions& directions) override;
  void make_directions(const at::Tensor& gradient, const HasGradient& has_gradient,
                       const optim::GradientFactors& factors, const at::Tensor& directions,
                       const std::function<void()>& on_values) override;
  // Values that were not updated are bfloat16 still, and rounding leaves those alone.
  FactoredParameters* factored() override { return update_->factored(); }
  bool reads_found_inf() const override { return update_->reads_found_inf(); }
  void uncount_step() override {
    --steps_;
    update_->uncount_step();
  }
  void visit_states(StateAccess access, const VisitState& visit) override {
    update_->visit_states(access, visit);
  }
  // The values in fp32 are there within step() alone.
  void visit_memory(const VisitMemory& visit) override { update_->visit_memory(visit); }
  void set_updates(int64_t updates) override {
    steps_ = static_cast<uint64_t>(updates);
    update_->set_updates(updates);
  }

 private:
  const at::Tensor values_;  // [owned numel] bfloat16
  const uint64_t seed_;
  const at::Tensor wide_;                     // [owned numel] fp32; has memory within step() only
  const std::unique_ptr<PageUpdate> update_;  // of wide_
  std::vector<ParameterShard> shards_;
  uint64_t steps_ = 0;  // made
};

}  // namespace zeropage::zero
