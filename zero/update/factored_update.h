// Adafactor's update of a page's part (zeropage/adafactor.h). The moments of rows and columns are in this process's memory, also where
// the values are in a tier: they are a thousandth of them.
//
// Threads: as PageUpdate's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "zero/update/factored_parameters.h"
#include "zero/update/fused_form.h"
#include "zero/update/page_update.h"
#include "zeropage/adafactor.h"

namespace zeropage::zero {

std::shared_ptr<const FusedForm> factored_form();

class FactoredUpdate final : public PageUpdate, private FactoredParameters {
 public:
  explicit FactoredUpdate(OwnedPart part) : part_(std::move(part)) {}

  void add_groups(std::vector<OwnedGroup> groups) override;
  void set_options(size_t group, const torch::optim::OptimizerOptions& options) override;
  void make_directions(const at::Tensor& gradient, const HasGradient& has_gradient,
                       const optim::GradientFactors& factors, const at::Tensor& directions,
                       const std::function<void()>& on_values) override;
  void step(const at::Tensor& gradient, const HasGradient& has_gradient,
            const optim::GradientFactors& factors, const Directions& directions) override;
  void visit_states(StateAccess access, const VisitState& visit) override;
  void visit_memory(const VisitMemory& visit) override {
    for (const Shard& shard : shards_) {
      for (const at::Tensor& of : shard.moments) visit(of, memory::Kind::kOptimizerState);
    }
  }
  // Each shard counts its steps.
  void set_updates(int64_t /*updates*/) override {}
  FactoredParameters* factored() override { return this; }

 private:
  struct Shard {
    ParameterShard of;
    size_t group = 0;
    int64_t steps = 0;
    // Those of rows and of columns, or those of elements. None until it has to have them.
    std::vector<at::Tensor> moments = {};
  };

  void raise_to_magnitudes(size_t parameter, const at::Tensor& gradient, double scale,
                           const at::Tensor& magnitudes) override;
  void add_squares(size_t parameter, const at::Tensor& gradient, double scale,
                   const at::Tensor& windows, const at::Tensor& sums) override;
  void take(size_t parameter, const at::Tensor& sums) override;

  const AdafactorOptions& options_of(const Shard& shard) const { return options_[shard.group]; }
  Shard& shard_of(size_t parameter) { return shards_[by_parameter_.at(parameter)]; }
  void make_moments(Shard& shard) const;
  void direct(const Shard& shard, const at::Tensor& gradient, double scale,
              const at::Tensor& directions) const;

  const OwnedPart part_;
  std::vector<AdafactorOptions> options_;  // by group
  std::vector<Shard> shards_;
  std::unordered_map<size_t, size_t> by_parameter_;  // of shards_
};

}  // namespace zeropage::zero
