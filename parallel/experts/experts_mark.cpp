#include "parallel/experts/experts_mark.h"

#include <torch/csrc/autograd/custom_function.h>

#include "parallel/slice_gradient.h"

namespace zeropage::parallel::experts {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class WeightOfLayer : public torch::autograd::Function<WeightOfLayer> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& weight, int64_t ranks) {
    context->saved_data["ranks"] = ranks;
    return weight.view_as(weight);
  }
  // Nobody else has the gradient of the view.
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const at::Tensor& gradient = gradients[0];
    return {at::Tensor(gradient).div_(context->saved_data["ranks"].toInt()), at::Tensor()};
  }
};

}  // namespace

ExpertsMark::ExpertsMark(std::string who, RanksPointer ranks, SlicedDimension cut, comm::World same,
                         at::Tensor whole)
    : SliceMark(std::move(who), std::move(ranks), std::move(cut)),
      same_(std::move(same)),
      whole_(std::move(whole)) {}

ExpertsMark* experts_mark_of(const at::Tensor& tensor) {
  return dynamic_cast<ExpertsMark*>(operators::mark_of(tensor));
}

c10::intrusive_ptr<KnownSlice> ExpertsMark::of_result() const {
  return c10::make_intrusive<ExpertsMark>(who(), group(), cut(), same_);
}

at::Tensor weight_of_layer(const at::Tensor& weight, const comm::World& ranks) {
  watch_gradient(weight);
  const SlicesAsTheyAre scope;
  return WeightOfLayer::apply(weight, static_cast<int64_t>(ranks.size()));
}

}  // namespace zeropage::parallel::experts
