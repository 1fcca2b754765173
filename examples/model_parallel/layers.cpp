#include "model_parallel/layers.h"

namespace model_parallel {

zeropage::PipelineLayers layers_of(image_models::ResNet& net) {
  zeropage::PipelineLayers layers;
  layers.push_back(
      {"stem", {net->conv1.ptr(), net->bn1.ptr()}, [net](const at::Tensor& images) mutable {
         return net->maxpool(torch::relu(net->bn1(net->conv1(images))));
       }});
  for (const torch::nn::Sequential& stage : {net->layer1, net->layer2, net->layer3, net->layer4}) {
    for (const zeropage::PipelineLayer& block : zeropage::layers_of(stage)) layers.push_back(block);
  }
  layers.push_back({"head", {net->fc.ptr()}, [net](const at::Tensor& x) mutable {
                      return net->fc(x.mean({2, 3}));
                    }});
  return layers;
}

}  // namespace model_parallel
