// Updates by a user's own TensorUpdate (zeropage/tensor_update.h): its two passes over what this rank owns of a page.
//
// States are fp32 tensors on the device, one for each parameter's part.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "zero/update/fused_update.h"
#include "zero/update/page_update.h"
#include "zeropage/tensor_update.h"

namespace zeropage::zero {

class OwnTensorUpdate final : public PageUpdate {
 public:
  OwnTensorUpdate(OwnedPart part, std::shared_ptr<const TensorUpdateBase> update);

  void add_groups(std::vector<OwnedGroup> groups) override;
  void set_options(size_t group, const torch::optim::OptimizerOptions& options) override {
    options_[group] = options.clone();
  }
  void step(const at::Tensor& gradient, const HasGradient& has_gradient,
            const optim::GradientFactors& factors, const Directions& directions) override;
  void make_directions(const at::Tensor& gradient, const HasGradient& has_gradient,
                       const optim::GradientFactors& factors, const at::Tensor& directions,
                       const std::function<void()>& on_values) override;
  void visit_states(StateAccess access, const VisitState& visit) override;
  void visit_memory(const VisitMemory& visit) override {
    for (const Shard& shard : shards_) {
      for (const at::Tensor& of : shard.states) visit(of, memory::Kind::kOptimizerState);
    }
  }
  // Each parameter counts its steps.
  void set_updates(int64_t /*updates*/) override {}

 private:
  struct Shard {
    size_t parameter;
    size_t group;
    Range range;  // in the owned part
    int64_t steps = 0;
    std::vector<at::Tensor> states = {};
    std::vector<std::string> names = {};  // of them
  };

  void make_states(Shard& shard) const;

  const OwnedPart part_;
  const std::shared_ptr<const TensorUpdateBase> update_;
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options_;  // by group
  std::vector<Shard> shards_;
};

}  // namespace zeropage::zero
