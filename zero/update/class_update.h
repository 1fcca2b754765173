// Updates by a torch::optim class as LibTorch wrote it: its bits, and any class that is
// element-wise.
//
// On the host the class runs over tiles that fit the second-level cache, so its ten passes over
// memory cost about one. Low-precision gradients of master weights are widened for the length of
// the step: 4 bytes an element of the owned part.
#pragma once

#include <vector>

#include "zero/update/page_update.h"

namespace zeropage::zero {

using MakeClassOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(
    std::vector<torch::optim::OptimizerParamGroup>)>;

class ClassUpdate final : public PageUpdate {
 public:
  ClassUpdate(OwnedPart part, MakeClassOptimizer make_class_optimizer)
      : part_(std::move(part)), make_class_optimizer_(std::move(make_class_optimizer)) {}

  void add_groups(std::vector<OwnedGroup> groups) override;
  void set_options(size_t group, const torch::optim::OptimizerOptions& options) override;
  void step(const at::Tensor& gradient, const HasGradient& has_gradient,
            const optim::GradientFactors& factors, const Directions& directions) override;
  // What the class saves of itself: tensors with an element for each of the tile's, and `step`. A class
  // without that number counts as having stepped when the optimizer has. Throws where it saves anything
  // else, or does not load what it saved. kWrite costs the states once more.
  void visit_states(StateAccess access, const VisitState& visit) override;
  void visit_memory(const VisitMemory& visit) override;
  void set_updates(int64_t updates) override { steps_ = updates; }

 private:
  struct Tile {
    size_t parameter;
    Range range;          // in the owned part
    at::Tensor values;    // [numel]
    at::Tensor copy_out;  // [numel], or undefined
  };

  torch::optim::OptimizerParamGroup mirror(OwnedGroup group);
  OwnedState saved_state(const Tile& tile) const;
  void load_states(const std::vector<OwnedState>& states);
  void write_group(torch::serialize::OutputArchive& archive, size_t group) const;

  const OwnedPart part_;
  const MakeClassOptimizer make_class_optimizer_;
  std::vector<Tile> tiles_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;  // its groups mirror those that were added
  int64_t steps_ = 0;
};

}  // namespace zeropage::zero
