#include "zeropage/pipeline.h"

namespace zeropage {

PipelineLayers layers_of(const torch::nn::Sequential& sequential) {
  PipelineLayers layers;
  const auto children = sequential->named_children();
  size_t index = 0;
  for (const auto& child : children) {
    // An AnyModule is a handle: the copy runs the same module.
    auto module = std::make_shared<torch::nn::AnyModule>(*(sequential->begin() + index));
    layers.push_back({child.key(), {child.value()}, [module](const at::Tensor& x) {
                        return module->forward<at::Tensor>(x);
                      }});
    ++index;
  }
  return layers;
}

PipelineLayers layers_of(
    const torch::nn::ModuleList& list,
    const std::function<at::Tensor(torch::nn::Module&, const at::Tensor&)>& forward) {
  PipelineLayers layers;
  for (const auto& child : list->named_children()) {
    layers.push_back(
        {child.key(), {child.value()}, [module = child.value(), forward](const at::Tensor& x) {
           return forward(*module, x);
         }});
  }
  return layers;
}

}  // namespace zeropage
